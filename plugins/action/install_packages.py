"""Installs apt packages where one is missing, in one way for all roles."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.loader import action_loader
from ansible.utils.display import Display

# Prints "NAME (PROCESS)" of who has the lock of this file.
HOLDER = """for process in $(awk -v i=":$(stat -c %i {path})$" '$2 == "POSIX" && $6 ~ i {{ print $5 }}' /proc/locks); do
    echo "$(cat /proc/$process/comm) ($process)"; break
done"""
LOCK = "/var/lib/dpkg/lock-frontend"
NodeState = action_loader.get("node_state", class_only=True)


class ActionModule(NodeState):
    """`names: [PACKAGE, …]` are installed. Nobody is asked where node_state has just seen that they are there.

    Without what they recommend; while somebody else holds apt's lock (the first upgrade of a PC that was installed from
    an old medium takes long) for half an hour at most. A check fetches no lists, and says what is missing.
    """

    _VALID_ARGS = frozenset(("names",))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        ActionBase.run(self, tmp, task_vars)
        variables = task_vars or {}
        seen = self.seen({"packages": self._task.args["names"]}, variables)
        if seen.get("failed") or seen.get("unreachable"):
            return seen
        missing = seen["missing"]
        said = {"diff": {"prepared": f"to be installed: {' '.join(missing)}\n"}} if missing else {}
        if not missing or self._task.check_mode:
            return {"changed": bool(missing), **said}
        how = {
            "name": missing,
            "install_recommends": False,
            "update_cache": True,
            "cache_valid_time": 86400 if seen["apt_lists"] else 0,
            "lock_timeout": 1800,
        }
        name = variables.get("inventory_hostname")
        if holder := self._holder():
            Display().display(
                f"{name}: {holder} is at work on its packages. This waits for it, half an hour at most."
            )
        done = self._execute_module("ansible.builtin.apt", how, task_vars=variables)
        if done.get("failed") and "lock" in done.get("msg", "") and (holder := self._holder()):
            done["msg"] = (
                f"{holder} is still at work on its packages. Run this again when it has ended. {done['msg']}"
            )
        return {**done, **said, "changed": True, "ansible_facts": {"node_looks": {}}}

    def _holder(self) -> str:
        """Who holds apt's lock; empty when nobody does."""
        said = self._low_level_execute_command(HOLDER.format(path=LOCK))["stdout"]
        return str(said).strip()
