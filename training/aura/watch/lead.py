"""Which rank leads a run: copies are made where it is, and its news are told from there.

It is the lowest of those that train now, as cluster/register.py writes it down beside each rank: no PC is special.
Standard library only.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

VOTE = "vote.json"  # register.FILE, in the directory of a rank


class Lead(NamedTuple):
    """Who trains, as a node knows it: of two nodes the one with the larger one is right."""

    launch: str = ""  # the later, the larger; '' of a run that was started by hand
    record: int = 0
    members: tuple[int, ...] = ()  # ranks; none: nobody has written it down, and rank 0 leads

    @property
    def rank(self) -> int:
        return min(self.members, default=0)

    @property
    def age(self) -> tuple[str, int]:
        return self.launch, self.record

    def as_json(self) -> dict[str, Any]:
        return {"launch": self.launch, "record": [self.record, self.members]}


def lead_in(content: bytes) -> Lead:
    """What a vote says, or what `as_json` was made of. A broken one says nothing."""
    try:
        values = json.loads(content)
        number, members = values.get("record", (0, ()))
        return Lead(str(values["launch"]), int(number), tuple(map(int, members)))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Lead()


def lead_of(run: Path) -> Lead:
    """As the ranks know it that are on this node; it has the lead where `rank` is one of them. Raises OSError."""
    found = Lead()
    for vote in run.glob(f"rank-*/{VOTE}"):
        with suppress(FileNotFoundError):  # who launches anew has just taken it away
            found = max(found, lead_in(vote.read_bytes()))
    return found
