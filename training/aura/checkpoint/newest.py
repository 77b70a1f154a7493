"""Which checkpoint is the newest: on one disk, and of those on the disks of all ranks.

It is that of the last attempt that wrote one, whoever holds it: a disk that was not there may hold more steps of an
attempt that the others have left behind.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from aura.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    Damaged,
    Writer,
    checkpoints,
    read,
    step_of,
    verify,
    writer_of,
)
from aura.cluster.ranks import Ranks
from aura.texts.console import text

Report = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    path: Path
    writer: Writer
    step: int
    model_sha256: str


def newest_valid(directory: Path, report: Report) -> Found | None:
    """The newest checkpoint whose files are what they were when written: of the last attempt that wrote one, the one
    with the most steps. Says loudly which ones it refuses."""
    for path in sorted(checkpoints(directory), key=age, reverse=True):
        try:
            manifest = verify(path)
        except Damaged as reason:
            report(text("checkpoint_refused", name=path.name, reason=reason))
            continue
        return Found(path, writer_of(manifest), manifest["step"], manifest["files"][MODEL]["sha256"])
    return None


def age(path: Path) -> tuple[int, int, str]:
    """The newer, the larger; largest where it cannot be read, so that it is looked at, and refused."""
    try:
        number = writer_of(read(path)).number
    except Damaged:
        number = sys.maxsize
    return number, step_of(path), path.name


def next_writer(directory: Path, attempt: str, ranks: Ranks) -> Writer:
    """This attempt, with a number above those of all that any rank's disk knows, also of what was set aside."""
    highest = 0
    for path in directory.glob(f"*/{MANIFEST}"):
        with suppress(OSError, ValueError, TypeError):
            highest = max(highest, writer_of(json.loads(path.read_text(encoding="utf-8"))).number)
    return Writer(1 + max(number for (number,) in ranks.gather([highest])), attempt)


class Ballot(NamedTuple):
    """What a rank says of the newest checkpoint on its disk."""

    number: int  # of the attempt that wrote it
    attempt: int  # its name, as a number
    step: int
    model: int  # its checksum


EMPTY = Ballot(-1, 0, -1, 0)


def ballot_of(found: Found | None) -> Ballot:
    if found is None:
        return EMPTY
    attempt = int(hashlib.sha256(found.writer.attempt.encode()).hexdigest()[:15], 16)
    return Ballot(found.writer.number, attempt, found.step, int(found.model_sha256[:15], 16))


def winner(ballots: list[Ballot], nodes: list[str]) -> int | None:
    """The lowest rank that holds the newest checkpoint of the last attempt; None where nobody holds one.

    Where two attempts have the same number, because each went on without the other, the one that more nodes know
    counts. `nodes`: of every rank. An empty disk says nothing.
    """
    held = [(rank, one) for rank, one in enumerate(ballots) if one != EMPTY]
    last = [(rank, one) for rank, one in held if one.number == max(ballots).number]
    if not last:
        return None
    known_to: dict[int, set[str]] = defaultdict(set)
    for rank, one in last:
        known_to[one.attempt].add(nodes[rank])
    return max(last, key=lambda two: (len(known_to[two[1].attempt]), two[1].step, -two[0]))[0]
