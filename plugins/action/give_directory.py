"""Gives a directory (or a file) of the controller to a node, or fetches one, by rsync, in one way for all roles."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.loader import action_loader


class ActionModule(ActionBase):
    """What ansible.posix.synchronize does, over the connection that Ansible itself would take.

    from, to: paths, with `/` at the end as rsync means it; what is not in the one goes from the other. user: who reads
    and writes there, without a password (sudo asks the controller's account for nothing); the login user where
    it is not said. Root never: a link that lies below another user's directory would lead it to any file of the node.
    pull: from the node. options: more of rsync's.
    """

    _VALID_ARGS = frozenset(("from", "to", "user", "pull", "options"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables, asked = task_vars or {}, self._task.args
        task = self._task.copy()
        task.args = {
            "src": asked["from"],
            "dest": asked["to"],
            "mode": "pull" if asked.get("pull") else "push",
            "archive": False,
            "recursive": True,
            "times": True,
            "delete": True,
            # What a copy that broke off has brought is the next one's beginning; it is looked at before it is used.
            "delay_updates": False,
            # The project's known_hosts, and no machine but the node; a port that is a template it does not see.
            "use_ssh_args": True,
            "verify_host": True,
            "dest_port": int(self._templar.template(variables.get("ansible_port", 22))),
            "rsync_opts": ["--mkpath", *asked.get("options", [])],
        }
        if asked.get("user"):
            task.args["rsync_path"] = f"sudo -u {asked['user']} rsync"
        synchronize = action_loader.get(
            "ansible.posix.synchronize", task=task, connection=self._connection, play_context=self._play_context,
            loader=self._loader, templar=self._templar, shared_loader_obj=self._shared_loader_obj,
        )  # fmt: skip
        return synchronize.run(task_vars=variables)
