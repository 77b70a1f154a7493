"""Plays on nodes whose cards, next start, connection and runs are recorded: tasks read them by stand-ins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tree
import yaml
from plays import played
from terminal import at_a_terminal

BOOT = {
    "passphrase": False, "live": False, "windows": "", "boot_entry": "", "wsl": False, "reboot_required": False,
}  # fmt: skip
AWAY, HERE = "198.51.100.9 50000 198.51.100.2 22", "198.51.100.2 50000 198.51.100.2 22"
# A node's variable `recorded` has gpu, boot (what differs from BOOT) and runs (active units); from the second look on
# `recorded_later` counts, where it has that. systemctl reads the runs that the last look has left.
FACTS = f"""
from pathlib import Path

from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        place = Path(__file__).parent.parent / task_vars["inventory_hostname"]
        looks = place.with_suffix(f".{{self._task.action}}")
        name = "recorded_later" if looks.exists() and "recorded_later" in task_vars else "recorded"
        looks.touch()
        recorded = task_vars[name]
        if self._task.action == "gpu_facts":
            facts = {{"gpu": recorded["gpu"], "distribution": recorded["distribution"]}}
            return {{"ansible_facts": facts}}
        place.write_text("".join(f"{{unit}} loaded active running\\n" for unit in recorded.get("runs", [])))
        return {{"ansible_facts": {{"boot": {BOOT!r} | recorded.get("boot", {{}})}}}}
"""
SYSTEMCTL = '#!/bin/sh\ncat "${0%/*}/../$NODE"\n'


def run_plays(
    place: Path, plays: list[dict[str, Any]], hosts: dict[str, Any], *words: str, typed: Sequence[str] | None = None
) -> tuple[int, str]:  # fmt: skip
    """Whether they fail, and what they say. hosts: their variables. typed: answers at a terminal; without any there
    is none."""
    programs = {"action/gpu_facts.py": FACTS, "action/boot_facts.py": FACTS}
    for name, text in {**programs, "bin/systemctl": SYSTEMCTL}.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    environment = {
        "NODE": "{{ inventory_hostname }}", "PATH": f"{place}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SSH_CONNECTION": f"{{{{ connection | default('{AWAY}') }}}}",
    }  # fmt: skip
    plays = [play | {"environment": environment, "gather_facts": False} for play in plays]
    variables = {"ansible_connection": "local", "ansible_become": False}
    groups = {"cluster": {"hosts": hosts, "vars": variables}}
    actions = f"{place}/action"
    if typed is None:
        done = played(place, plays, groups, *words, ANSIBLE_ACTION_PLUGINS=actions)
        return done.returncode, " ".join(done.stdout.split())
    (place / "hosts.json").write_text(json.dumps(groups))
    (place / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    command = ["ansible-playbook", "-i", str(place / "hosts.json"), str(place / "play.yml"), *words]
    return at_a_terminal(command, list(typed), ANSIBLE_ACTION_PLUGINS=actions)


def with_absolute_paths(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tasks of a playbook that include others of playbooks/tasks, for a play that lies elsewhere."""
    found = []
    for task in tasks:
        for word in ("ansible.builtin.import_tasks", "ansible.builtin.include_tasks"):
            told = task.get(word)
            if isinstance(told, str):
                task = task | {word: str(tree.ROOT / "playbooks" / told)}
            elif told:
                task = task | {word: told | {"file": str(tree.ROOT / "playbooks" / told["file"])}}
        found.append(task)
    return found
