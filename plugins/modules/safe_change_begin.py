"""Begins a change of network, firewall or sshd that undoes itself unless it is confirmed (role safe_change).

Hands the change to the node's program safe-change, which backs up, arms the way back and applies it in the background,
and answers the change's id for the program's other commands. In check mode it only shows what would differ.

of: what changes, in a word for people. why: what there is to do beside new files. seconds: until it is undone. files,
directories, check, apply, undo: as the program takes them (roles/safe_change/files/safe-change).
"""

from __future__ import annotations

import json

from ansible.module_utils.node_files import file_state
from ansible.module_utils.quiet_module import Quiet

PROGRAM = "/usr/local/lib/aura/safe-change"


def old(path: str) -> tuple[str, str]:
    """What is there now: the text of the file (or where the link leads), and its mode."""
    there = file_state(path)
    if there["kind"] == "link":
        return f"-> {there['target']}\n", "link"
    if there["kind"] != "file":
        return "", "absent"
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(), str(there["mode"])


def new(file: dict[str, str]) -> tuple[str, str]:
    if file.get("absent"):
        return "", "absent"
    if "link" in file:
        return f"-> {file['link']}\n", "link"
    return file["content"], str(file.get("mode", "0644"))


def differences(files: list[dict[str, str]]) -> list[dict[str, str]]:
    """In the form in which Ansible shows them."""
    found = []
    for file in files:
        (before, before_mode), (after, after_mode) = old(file["path"]), new(file)
        if (before, before_mode) != (after, after_mode):
            headers = {
                "before_header": f"{file['path']} ({before_mode})",
                "after_header": f"{file['path']} ({after_mode})",
            }
            found.append({"before": before, "after": after, **headers})
    return found


def main() -> None:
    lists = {name: {"type": "list", "elements": "list", "default": []} for name in ("apply", "undo")}
    module = Quiet(
        argument_spec={
            "of": {"type": "str", "required": True},
            "why": {"type": "str", "default": ""},
            "files": {"type": "list", "elements": "dict", "default": []},
            "directories": {"type": "list", "elements": "str", "default": []},
            "check": {"type": "str", "default": ""},
            "seconds": {"type": "int", "default": 60},
            **lists,
        },
        supports_check_mode=True,
    )
    plan = dict(module.params)
    why = plan.pop("why")
    shown = differences(plan["files"])
    if why:
        shown.append({"prepared": why + "\n"})
    result = {"changed": True, "diff": shown}
    if module.check_mode:
        module.exit_json(**result)
    code, said, complaint = module.run_command([PROGRAM, "begin"], data=json.dumps(plan))
    if code:
        module.fail_json(msg=complaint.strip() or said.strip())
    # What was seen of the node before does not hold any more (node_state).
    module.exit_json(**result, id=json.loads(said)["id"], ansible_facts={"node_looks": {}})


if __name__ == "__main__":
    main()
