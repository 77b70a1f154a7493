"""Somebody else's script: what of its directory goes to the nodes, its environment's name, who has failed first.

docs/decisions/0008-foreign-scripts.md says why this is no Jinja.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

INCLUDED = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[\s=]+(\S+)", re.MULTILINE)
HIDDEN = re.compile(r"hiding (?:file|directory) (.+) because of pattern")
LAST = 1e12  # seconds: later than whatever has failed
Node = Mapping[str, Any]


def directory_report(lines: Sequence[str]) -> dict[str, Any]:
    """What rsync would send, and what not: its lines with --dry-run --out-format='%l %n' --debug=FILTER."""
    sizes: Counter[str] = Counter()
    files = [line for line in lines if line[:1].isdigit() and not line.endswith("/")]
    for line in files:
        size, _, name = line.partition(" ")
        sizes[name.partition("/")[0]] += int(size)
    return {
        "files": len(files),
        "megabytes": round(sizes.total() / 1e6, 1),
        "largest": ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in sizes.most_common(3)),
        "left_out": sorted(found[1] for line in lines if (found := HIDDEN.search(line))),
    }


def read_requirements(path: Path) -> Iterator[bytes]:
    """A list of packages, and those that it names with -r and -c."""
    if path.is_file():
        yield path.read_bytes()
        for name in INCLUDED.findall(path.read_text(errors="replace")):
            yield from read_requirements(path.parent / name)


def environment_name(request: Mapping[str, Any], wheelhouse: str) -> str:
    """Of a script's environment: another name where anything that goes into it is another."""
    parts = [*request["packages"], wheelhouse]
    if request["requirements"]:
        requirements = Path(request["requirements"])
        parts += [hashlib.sha256(text).hexdigest() for text in read_requirements(requirements)]
        for wheel in sorted(requirements.parent.glob("wheels/*.whl")):
            parts.append(f"{wheel.name} {wheel.stat().st_size} {wheel.stat().st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def node_failures(name: str, status: Node) -> list[dict[str, Any]]:
    """What has failed on a node, each with its time: that of a rank's traceback, or 0 for what makes others fail."""
    ranks = status.get("ranks", [])
    failed = [{**rank, "node": name, "cause": ""} for rank in ranks if rank["state"] == "failed"]
    unit = {"exit": status.get("unit_exit"), "signal": status.get("unit_signal")}
    launcher = {"rank": None, "node": name, "tail": [], "cause": "", **unit}
    if not status or (status["active"] and not ranks):
        return [launcher | {"failed": LAST, "cause": "silent"}]
    if status.get("unit_result") == "oom-kill":
        # systemd stops the others then, so they say "stopped"; and those on other nodes fail before this is known.
        victim = next((rank for rank in failed if rank["signal"] == "SIGKILL"), launcher)
        return [victim | {"failed": 0.0, "cause": "memory"}]
    # A launcher may complain at its end that the first node's has left before it.
    through = any(rank["state"] in ("done", "stopped") for rank in ranks)
    if status.get("unit") == "failed" and not failed and not through:
        return [launcher | {"failed": status["unit_ended"]}]
    if any(rank.get("went_off") for rank in ranks):  # it has booted since; the others lose their peer by that
        return [launcher | {"failed": 0.0, "cause": "off"}]
    return failed


def script_failure(nodes: Sequence[Node]) -> dict[str, Any]:
    """Which rank (or which node's launcher) has failed first, of what every node's script_status says; {} if none has.

    Whoever only loses a peer prints its traceback later, on clocks that agree to a few milliseconds. Where none has
    failed, a node of which nothing is heard.
    """
    found = [
        one for node in nodes for one in node_failures(node["inventory_hostname"], node["script_status"])
    ]
    return min(found, key=lambda failure: failure["failed"], default={})


def failure_sentence(failure: Mapping[str, Any], launcher: str, journal: str = "") -> str:
    node = failure["node"]
    who = f"The launcher ({launcher})" if failure["rank"] is None else f"Rank {failure['rank']}"
    how = (
        f"was ended by {failure['signal']}"
        if failure["signal"]
        else f"ended with exit status {failure['exit']}"
    )
    if failure["cause"] == "memory":
        how = "was ended because that PC's memory ran out (journalctl -k there)"
    first = {
        "silent": f"{node} has not begun in time (script_start_timeout).",
        "off": f"{node} went off while its ranks were at work, and is back.",
    }.get(failure["cause"], f"{who} on {node} {how}, the first one to fail.")
    last = "\n".join(failure["tail"]) or journal or "It has said nothing."
    return f"{first} Its last lines:\n{last}"


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "directory_report": directory_report,
            "environment_name": environment_name,
            "failure_sentence": failure_sentence,
            "script_failure": script_failure,
            "shell_words": shlex.split,
        }
