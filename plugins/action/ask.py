"""Asks the person at the terminal."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail, AnsiblePromptInterrupt, AnsiblePromptNoninteractive
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display


class ActionModule(ActionBase):
    """`question` is answered by yes (Enter) or no, with `default` by any words; `answer` is empty where nobody is at
    a terminal to be asked."""

    _VALID_ARGS = frozenset(("question", "default"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        default = self._task.args.get("default", "")
        answer = ""
        while not answer:
            try:
                said = Display().prompt_until(f"\n{self._task.args['question']} [{default or 'Y/n'}] ")
            except (AnsiblePromptNoninteractive, OSError):  # the second: a terminal that is another session's
                return {"changed": False, "answer": ""}
            except AnsiblePromptInterrupt:
                raise AnsibleActionFail("Interrupted. Nothing has been changed on any node.") from None
            typed = bytes(said).decode(errors="replace").strip()
            words = {"": "yes", "y": "yes", "yes": "yes", "n": "no", "no": "no"}
            answer = typed or default if default else words.get(typed.lower(), "")
        return {"changed": False, "answer": answer}
