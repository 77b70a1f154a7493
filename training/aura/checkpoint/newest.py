"""Which checkpoint is the newest: on one disk, and of those on the disks of all ranks.

It is that of the last attempt that wrote one: a disk that was not there may hold more steps of an attempt that the
others have left behind. Last is an attempt of which no other one knew. Where there are several, each went on without
the others, and a minority that was often started does not win by its number: what more nodes stand behind counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
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
    described,
    follows,
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


def newest_valid(directories: Sequence[Path], report: Report) -> Found | None:
    """The newest checkpoint whose files are what they were when written: of the last attempt that wrote one, the one
    with the most steps. Says loudly which ones it refuses."""
    there = [path for directory in directories for path in checkpoints(directory)]
    for path in sorted(there, key=age, reverse=True):
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


def next_writer(directories: Sequence[Path], attempt: str, ranks: Ranks) -> Writer:
    """This attempt, with a number above those of all that any rank's disk knows, also of what was set aside."""
    highest, known = 0, set[str]()
    for path in (file for directory in directories for file in directory.glob(f"*/{MANIFEST}")):
        with suppress(OSError, ValueError, TypeError):
            writer = writer_of(json.loads(path.read_text(encoding="utf-8")))
            highest = max(highest, writer.number)
            known |= {writer.attempt, *(writer.known or ())} - {""}
    told = ranks.all_of({"highest": highest, "known": sorted(known)})
    return Writer(
        1 + max(one["highest"] for one in told),
        attempt,
        tuple(sorted({name for one in told for name in one["known"]})),
    )


class Ballot(NamedTuple):
    """What a rank says of the newest checkpoint on its disk."""

    writer: Writer
    step: int
    model: str  # its checksum


def ballots_of(found: Found | None, ranks: Ranks) -> list[Ballot | None]:
    """That of every rank; None where its disk is empty. All ranks have to ask."""
    mine = found and {**described(found.writer), "step": found.step, "model": found.model_sha256}
    return [
        Ballot(writer_of(one), one["step"], one["model"]) if one else None for one in ranks.all_of(mine or {})
    ]


def winner(ballots: list[Ballot | None], nodes: list[str]) -> int | None:
    """The lowest rank that holds the newest checkpoint of the last attempt; None where nobody holds one.

    `nodes`: of every rank. An empty disk says nothing. A disk that holds an attempt stands behind all that came after.
    """
    held = [(rank, one) for rank, one in enumerate(ballots) if one]
    writers = {one.writer for _, one in held}
    last = [(rank, one) for rank, one in held if not any(follows(other, one.writer) for other in writers)]
    if not last:
        return None

    def strength(writer: Writer) -> tuple[int, int]:
        behind = {nodes[rank] for rank, one in held if one.writer == writer or follows(writer, one.writer)}
        return len(behind), writer.number

    return max(last, key=lambda two: (strength(two[1].writer), two[1].step, -two[0]))[0]
