"""One line of the report, and the words that all checks use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]
SITE = "ansible-playbook site.yml"
WINDOWS = "ansible-playbook playbooks/windows.yml"
STOP = "ansible-playbook playbooks/stop.yml"


@dataclass(frozen=True)
class Check:
    id: str
    status: Status
    subject: str  # "all", "node3", "node0 -> node3" or "node0 <-> node3"
    message: str
    remedy: str = ""


def join(names: Iterable[str]) -> str:
    *most, last = [*names] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


def count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def fine(check: str, message: str) -> list[Check]:
    return [Check(check, "ok", "all", message)]


def unknown(check: str, reason: str) -> list[Check]:
    remedy = "Mend what failed above and check again."
    return [Check(check, "warning", "all", f"not checked: {reason}", remedy)]
