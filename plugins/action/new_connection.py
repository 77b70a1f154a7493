"""Runs commands on a node, each over a connection of its own that did not exist before."""

from __future__ import annotations

import shlex
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """`commands`: lists of words. Who cannot be reached is tried again until `seconds` are over, and has failed then.

    The answer: `reached` (every command had its connection) and what the last one `said`. It has
    also failed when a command said no; no further one is run then.
    """

    _VALID_ARGS = frozenset(("commands", "seconds"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        until = time.monotonic() + float(self._task.args["seconds"])
        answer: dict[str, Any] = {}
        for command in self._task.args["commands"]:
            answer = self._reach(shlex.join(command), until)
            if answer["failed"]:
                break
        return {"changed": False, **answer}

    def _reach(self, command: str, until: float) -> dict[str, Any]:
        while True:
            # Otherwise the connection that is still open from before would be used again.
            self._connection.reset()
            try:
                done = self._low_level_execute_command(command)
            except AnsibleConnectionFailure as failure:
                if time.monotonic() > until:
                    return {"failed": True, "reached": False, "said": "", "msg": failure.message}
                time.sleep(1)
                continue
            # With sudo there is a terminal, where all that is said comes out together.
            lines = [
                line
                for line in done["stdout_lines"] + done["stderr_lines"]
                if not line.startswith("Shared conn")
            ]
            said = "\n".join(lines).strip()
            failed = done["rc"] != 0
            return {"failed": failed, "reached": True, "said": said, **({"msg": said} if failed else {})}
