"""Has a systemd unit run with the files that lie on the disk now."""

from __future__ import annotations

import shlex
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.loader import action_loader

NodeState = action_loader.get("node_state", class_only=True)
STARTS_BY_ITSELF = ("static", "indirect", "generated", "transient")


class ActionModule(NodeState):
    """What ansible.builtin.systemd_service does with a handler's restart, but what has to be done follows from what is
    there, not from what changed in this run: a unit that was started before one of its files was written is started
    again, also when the run that wrote it failed before it came to that.

    name: in full (`chrony.service`). state: `started`, `stopped` or `masked`. enabled: whether it starts at boot.
    reads: paths that it reads when it starts, beside its own unit files; a directory is as new as the last file that
    came into it or went. renew: false where it goes on with the older ones. also: units whose files systemd has to have
    read too (a timer's service); whether they run is not this task's business.
    """

    _VALID_ARGS = frozenset(("name", "state", "enabled", "reads", "renew", "also"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        ActionBase.run(self, tmp, task_vars)
        variables = task_vars or {}
        name, reads = self._task.args["name"], self._task.args.get("reads", [])
        also = self._task.args.get("also", [])
        seen = self.seen({"units": [name, *also], "files": reads}, variables)
        if seen.get("failed") or seen.get("unreachable"):
            return seen
        read = [seen["files"][path]["mtime"] for path in reads]
        reload = any(seen["units"][one]["reload"] for one in [name, *also])
        unit = {**seen["units"][name], "reload": reload}
        todo = steps(self._task.args, unit, read, seen["now"])
        answer: dict[str, Any] = {"changed": bool(todo), "done": todo}
        if todo:
            answer["diff"] = {"prepared": "".join(f"systemctl {verb} {name}\n" for verb in todo)}
        if not todo or self._task.check_mode:
            return answer
        own = f" {shlex.quote(name)}"
        command = " && ".join(f"systemctl {verb}{own if verb != 'daemon-reload' else ''}" for verb in todo)
        asked = {"_raw_params": command, "_uses_shell": True}
        done = self._execute_module("ansible.builtin.command", asked, task_vars=variables)
        if done.get("failed") or done.get("unreachable"):
            said = done.get("stderr") or done.get("msg", "")
            return {**answer, **done, "failed": True, "msg": f"{command}: {said.strip()}"}
        return {**answer, "ansible_facts": {"node_looks": {}}}


def steps(asked: dict[str, Any], unit: dict[str, Any], read: list[float], now: float) -> list[str]:
    """The verbs of systemctl that are needed. unit: of node_state. read: when what it reads was written.

    Whenever there is something to do systemd reads its files first: of a unit that it has not loaded it does not say
    that it has missed one of them.
    """
    state, masked = asked.get("state", "started"), unit["enabled_state"] == "masked"
    if state == "masked":
        return [*(["stop"] if unit["active"] else []), *([] if masked else ["mask"])]
    todo = ["unmask"] if masked else []
    wanted = asked.get("enabled", True)
    if not (unit["exists"] or wanted) and state == "stopped":
        return []
    if unit["enabled"] != wanted and unit["enabled_state"] not in STARTS_BY_ITSELF:
        todo.append("enable" if wanted else "disable")
    if state == "stopped":
        todo += ["stop"] if unit["active"] else []
    elif not unit["active"]:
        todo.append("start")
    # A time to come says nothing (the clock was set since).
    elif unit["stale"] or any(unit["started"] < moment <= now for moment in read):
        todo += ["restart"] if asked.get("renew", True) else []
    return ["daemon-reload", *todo] if todo or unit["reload"] else []
