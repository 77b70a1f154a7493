"""Asks the person at the terminal."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail, AnsiblePromptInterrupt, AnsiblePromptNoninteractive
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display


class ActionModule(ActionBase):
    """`question` is answered by yes (Enter too) or no; `answer` is empty where nobody is at a terminal to be asked."""

    _VALID_ARGS = frozenset(("question",))
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        answer = ""
        while answer not in ("yes", "no"):
            try:
                said = Display().prompt_until(f"\n{self._task.args['question']} [Y/n] ")
            except (AnsiblePromptNoninteractive, OSError):  # the second: a terminal that is another session's
                return {"changed": False, "answer": ""}
            except AnsiblePromptInterrupt:
                raise AnsibleActionFail("Interrupted. Nothing has been changed on any node.") from None
            words = {"": "yes", "y": "yes", "yes": "yes", "n": "no", "no": "no"}
            answer = words.get(bytes(said).decode(errors="replace").strip().lower(), "")
        return {"changed": False, "answer": answer}
