"""All checks in their order, and the report for people and for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from aura.check.connectivity.checks import Check, Status, count, unknown
from aura.check.connectivity.cluster import (
    check_all_reduce,
    check_clock,
    check_disk,
    check_release,
    check_versions,
)
from aura.check.connectivity.evidence import SCHEMA, Evidence, Json, bandwidths, clock_offsets
from aura.check.connectivity.nodes import (
    check_address,
    check_answers,
    check_hostname,
    check_interface,
    check_link,
    check_names,
    check_probe,
    check_rendezvous_port,
    check_trainer,
)
from aura.check.connectivity.pairs import RATE_FAIL, RATE_WARN, check_bandwidth, check_tcp

MARKS: dict[Status, str] = {"ok": "✓", "warning": "!", "failed": "✗"}
# What a person calls it, and what it finds.
CHECKS: dict[str, tuple[str, Callable[[Evidence], list[Check]]]] = {
    "answers": ("answers over SSH", check_answers),
    "trainer": ("trainer installed", check_trainer),
    "probe": ("probe ran", check_probe),
    "address": ("LAN address", check_address),
    "hostname": ("hostname", check_hostname),
    "names": ("names resolve", check_names),
    "interface": ("interface", check_interface),
    "link": ("link speed", check_link),
    "rendezvous_port": ("port is free", check_rendezvous_port),
    "tcp_rendezvous": ("TCP, rendezvous", lambda evidence: check_tcp(evidence, "rendezvous")),
    "tcp_ephemeral": ("TCP, any port", lambda evidence: check_tcp(evidence, "ephemeral")),
    "bandwidth": ("bandwidth", check_bandwidth),
    "clock": ("clocks", check_clock),
    "release": ("release", check_release),
    "versions": ("versions", check_versions),
    "disk": ("free disk", check_disk),
    "all_reduce": ("all_reduce", check_all_reduce),
}


def judge(evidence: Evidence) -> list[Check]:
    """All checks, in order. With no document at all, the checks that need one say so in one line each."""
    found: list[Check] = []
    for name, (_, check) in CHECKS.items():
        if not evidence.probed and name not in ("answers", "trainer", "probe"):
            found += unknown(name, "no node could be probed")
        else:
            found += check(evidence)
    return found


def worst(checks: list[Check]) -> Status:
    statuses = {check.status for check in checks}
    return "failed" if "failed" in statuses else "warning" if "warning" in statuses else "ok"


def draw_matrix(evidence: Evidence) -> list[str]:
    """Mbit/s from each node (row) to each other one (column): 941, slow 640!, far too slow 94✗, not measured ?."""
    names = [node.name for node in evidence.nodes]
    rates = bandwidths(evidence)
    if not rates:
        return []

    def cell(sender: str, receiver: str) -> str:
        if sender == receiver:
            return "- "
        rate = rates.get((sender, receiver))
        if rate is None:
            return "? "
        if rate < RATE_FAIL * evidence.link_speed:
            return f"{rate:.0f}✗"
        return f"{rate:.0f}!" if rate < RATE_WARN * evidence.link_speed else f"{rate:.0f} "

    label = max(len("from \\ to"), *map(len, names))
    width = max(7, *(len(name) + 2 for name in names))
    head = "from \\ to".ljust(label) + "".join(f"{name} ".rjust(width) for name in names) + " Mbit/s"
    rows = [name.ljust(label) + "".join(cell(name, other).rjust(width) for other in names) for name in names]
    return [line.rstrip() for line in [head, *rows]]


def draw(evidence: Evidence, checks: list[Check]) -> list[str]:
    """The report for people. Checks that could not be made, all for the same reason, share one line."""
    margin = max(len(title) for title, _ in CHECKS.values()) + 4
    lines: list[str] = []

    def write(text: str, first_indent: int, indent: int) -> None:
        lines.extend(
            textwrap.wrap(
                text,
                width=110,
                initial_indent=" " * first_indent,
                subsequent_indent=" " * indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )

    unmade: dict[str, list[str]] = {}
    for check in checks:
        title, _ = CHECKS[check.id]
        if check.message.startswith("not checked: "):
            unmade.setdefault(check.message, []).append(title)
            continue
        write(f"{MARKS[check.status]} {title:{margin - 4}}  {check.message}", 0, margin)
        if check.remedy:
            write(f"→ {check.remedy}", margin, margin + 2)
        if check is [other for other in checks if other.id == "bandwidth"][-1]:
            lines += [" " * margin + row for row in draw_matrix(evidence)]
    for message, titles in unmade.items():
        write(f"{MARKS['warning']} {', '.join(titles)}: {message}", 0, 2)
    lines.append(summarize(evidence, checks))
    return lines


def summarize(evidence: Evidence, checks: list[Check]) -> str:
    tally = Counter(check.status for check in checks)
    parts = [f"{count(tally['failed'], 'check')} failed"] if tally["failed"] else []
    parts += [count(tally["warning"], "warning")] if tally["warning"] else []
    parts += [f"{tally['ok']} ok" if parts else f"all {tally['ok']} checks ok"]
    return f"{count(len(evidence.nodes), 'node')}: {', '.join(parts)}"


def as_json(evidence: Evidence, checks: list[Check]) -> Json:
    rates, offsets = bandwidths(evidence), clock_offsets(evidence)
    names = [node.name for node in evidence.nodes]
    return {
        "schema": SCHEMA,
        "status": worst(checks),
        "nodes": names,
        "checks": [asdict(check) for check in checks],
        "bandwidth_mbit": {a: {b: rates.get((a, b)) for b in names if b != a} for a in names},
        "clock_offset_seconds": {name: offsets.get(name) for name in names},
    }
