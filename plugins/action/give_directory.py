"""Gives a directory (or a file) of the controller to a node, or fetches one, by rsync, in one way for all roles."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shlex import quote
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.loader import action_loader

LARGE = 1 << 30  # bytes; what is smaller is given without a look
# Of a path in $path: bytes of what is there, and bytes that are free where it is or would be.
ROOM = (
    'du --summarize --bytes --dereference "$path" 2>/dev/null | cut --fields=1; echo :; '
    'until [ -e "$path" ]; do path=$(dirname "$path"); done; df --output=avail --block-size=1 "$path" | tail --lines=1'
)


def no_room(needs: int, there: int, free: int, where: str) -> str:
    """Why so many bytes do not fit: empty when they do. An earlier copy is the next one's beginning."""
    if needs <= there or needs - there + LARGE <= free:
        return ""
    return (
        f"There is no room for it in {where}: it is {needs / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there. "
        "Nothing was copied."
    )


def there_and_free(said: str) -> tuple[int, int]:
    there, _, free = said.partition(":")
    return int(there.strip() or 0), int(free)


class ActionModule(ActionBase):
    """What ansible.posix.synchronize does, over the connection that Ansible itself would take.

    from, to: paths, with `/` at the end as rsync means it; what is not in the one goes from the other. user: who reads
    and writes there, without a password (sudo asks the controller's account for nothing); the login user where
    it is not said. Root never: a link that lies below another user's directory would lead it to any file of the node.
    pull: from the node. options: more of rsync's. may_be_large: refused where there is no room, before anything comes.
    """

    _VALID_ARGS = frozenset(("from", "to", "user", "pull", "options", "may_be_large"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables, asked = task_vars or {}, self._task.args
        if asked.get("may_be_large") and (problem := self._no_room(asked)):
            return {"failed": True, "msg": problem}
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

    def _no_room(self, asked: dict[str, Any]) -> str:
        ends = [self._here, lambda path: self._there(path, asked.get("user"))]
        source, target = reversed(ends) if asked.get("pull") else ends
        if (needs := source(asked["from"])[0]) < LARGE:
            return ""
        to = asked["to"] if asked["from"].endswith("/") else str(Path(asked["to"], Path(asked["from"]).name))
        host = "the controller" if asked.get("pull") else self._play_context.remote_addr
        return no_room(needs, *target(to), f"{to} of {host}")

    def _here(self, path: str) -> tuple[int, int]:
        script = ["sh", "-c", ROOM]
        said = subprocess.run(
            script, env={**os.environ, "path": path}, capture_output=True, text=True, check=True
        )
        return there_and_free(said.stdout)

    def _there(self, path: str, user: str | None) -> tuple[int, int]:
        script = f"sh -c {quote(f'path={quote(path)}; {ROOM}')}"
        command = f"cd / && sudo -n -u {user} {script}" if user else script
        return there_and_free(self._low_level_execute_command(command, sudoable=False)["stdout"])
