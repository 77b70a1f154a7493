"""What a run in check mode would change on each node, written down for programs (action drift)."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: drift_report
author: Aura
type: stdout
short_description: What a check would change on each node, as JSON
description:
  - Prints nothing. At the end it writes what the tasks said into the file that AURA_DRIFT_REPORT names.
options: {}
"""
MOST_LINES = 60  # of one difference: a report is no backup

Json = dict[str, Any]


def differences(diffs: Any) -> list[Json]:
    """What Ansible shows with --diff, in its several forms, as a list."""
    return [entry for entry in (diffs if isinstance(diffs, list) else [diffs]) if isinstance(entry, dict)]


def detail(entry: Json) -> str:
    """One line for a person: which file, or which of its properties."""
    if "prepared" in entry:
        return str(entry["prepared"]).strip()
    before, after = entry.get("before", ""), entry.get("after", "")
    if isinstance(before, dict) and isinstance(after, dict):
        words = [f"{key} {before.get(key)} → {after[key]}" for key in after if before.get(key) != after[key]]
        return f"{after.get('path', '')}: {', '.join(words)}" if words else ""
    return str(entry.get("before_header") or entry.get("after_header") or "")


def unified(entry: Json) -> str:
    """What `diff -u` would say, shortened."""
    before, after = entry.get("before", ""), entry.get("after", "")
    if not (isinstance(before, str) and isinstance(after, str)) or before == after:
        return ""
    lines = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), "is", "should be", lineterm="")
    )
    left_out = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], *([f"… {left_out} lines more"] if left_out > 0 else [])])


def outermost_role(task: Any) -> str:
    """The role of site.yml that brought the task: of what safe_change does for sshd, sshd."""
    found = ""
    while task is not None:
        found = task._role.get_name() if task._role else found
        task = task._parent
    return found


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "drift_report"

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, Json] = {}
        self.roles: list[str] = []  # of the last play that has some, in order

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self.roles = [role.get_name() for role in play.get_roles()] or self.roles

    def v2_runner_on_ok(self, result: Any) -> None:
        node, said = self._node(result), result.result
        if said.get("changed") and not result.task.loop:
            self._changes(result)
        look = said.get("ansible_facts", {}).get("node_looks")
        if look:
            node |= {key: look["seen"][key] for key in ("upgrades", "reboot_required")}

    def v2_runner_item_on_ok(self, result: Any) -> None:
        if result.result.get("changed"):
            self._changes(result, str(self._get_item_label(result.result)))

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._node(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        if ignore_errors:
            return
        node, role = self._node(result), outermost_role(result.task)
        said = [one for one in result.result.get("results", []) if one.get("failed")] or [result.result]
        message = " ".join(str(said[0].get("msg", "")).split())
        # What a role refuses is how the node is; all else is a look that failed.
        if role and result.task.action.endswith(("assert", "preflight")):
            self._differs(result, "hand", [message])
        else:
            node["message"] = message or f"the task «{result.task.name}» failed"

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._node(result)["message"] = " ".join(str(result.result.get("msg", "")).split())

    def v2_playbook_on_stats(self, stats: Any) -> None:
        report = {"roles": self.roles, "nodes": self.nodes}
        Path(os.environ["AURA_DRIFT_REPORT"]).write_text(json.dumps(report), encoding="utf-8")

    def _node(self, result: Any) -> Json:
        node = self.nodes.setdefault(
            result.host.get_name(),
            {"differences": [], "message": "", "seen": [], "upgrades": [], "reboot_required": False},
        )
        role = outermost_role(result.task)
        if role not in node["seen"]:
            node["seen"].append(role)
        return node

    def _changes(self, result: Any, item: str = "") -> None:
        diffs = differences(result.result.get("diff", []))
        details, texts = (list(filter(None, map(say, diffs))) for say in (detail, unified))
        self._differs(result, "site.yml", details, item, "\n".join(texts))

    def _differs(self, result: Any, by: str, details: list[str], item: str = "", diff: str = "") -> None:
        role = outermost_role(result.task)
        self._node(result)["differences"].append(
            {"role": role, "task": result.task.name, "item": item, "by": by, "details": details, "diff": diff}
        )
