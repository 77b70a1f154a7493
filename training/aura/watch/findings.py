"""What `aura watch` has found, for `aura notify`, which tells a person: a line of JSON each, beside the faults.

It is in memory, as the faults are: a restart of the machine forgets it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from aura.watch.events import Event

NAME = "findings.jsonl"
MOST = 10**6  # bytes; then it begins anew


def add_finding(directory: Path, event: Event) -> None:
    """Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    is_full = path.exists() and path.stat().st_size > MOST
    with path.open("w" if is_full else "a", encoding="utf-8") as file:
        file.write(json.dumps({"id": secrets.token_hex(4), "event": asdict(event)}) + "\n")


def read_findings(directory: Path, after: str) -> Iterator[tuple[str, Event]]:
    """The ids and events behind the one with the id `after`; all, where there is none such. A broken line says
    nothing."""
    try:
        lines = (directory / NAME).read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    found = []
    for line in lines:
        try:
            content = json.loads(line)
            found.append((str(content["id"]), Event(**content["event"])))
        except (ValueError, KeyError, TypeError):
            continue
    ids = [one for one, _ in found]
    yield from found[ids.index(after) + 1 if after in ids else 0 :]
