"""Has nobody else at work on the nodes for as long as this ansible-playbook lives."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

HOLDER = Path(__file__).parents[2] / "playbooks/files/hold-lock"


def typed(words: list[str]) -> str:
    """The command as a person types it. What -e says may be nobody else's business."""
    result, hidden = ["ansible-playbook"], False
    for word in words:
        extra = word.startswith(("-e", "--extra-vars"))
        result.append("…" if hidden else word.partition("=")[0][:12] if extra else word)
        hidden = word in ("-e", "--extra-vars")
    return " ".join(result)


class ActionModule(ActionBase):
    """`nodes`: where each of them may be, and how ssh logs in (`cluster_lock`); `lasts`: seconds that a lease lasts."""

    _VALID_ARGS = frozenset(("nodes", "lasts"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        who = f"{os.environ.get('SUDO_USER') or getpass.getuser()}@{socket.gethostname()}"
        request = {
            **self._task.args,
            "process": os.getppid(),  # this is a fork of ansible-playbook
            "run": {"token": uuid.uuid4().hex, "who": who, "command": typed(sys.argv[1:])},
        }
        # It outlives this task, and an ansible-playbook that is killed.
        holder = subprocess.Popen(
            [sys.executable, HOLDER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        assert holder.stdin and holder.stdout and holder.stderr
        with holder.stdin as channel:
            json.dump(request, channel)
        said = holder.stdout.readline()
        problems = json.loads(said) if said else [f"The lock's holder has died: {holder.stderr.read()}"]
        if problems:
            return {"failed": True, "msg": "\n".join([*problems, "Nothing has been changed on any node."])}
        return {"changed": False}
