"""Copies of a run in the nodes' memory, between two checkpoints on their disks: what a death costs is minutes.

A copy is a checkpoint like those on a disk, in a directory of a file system in memory: it outlives the trainers, and
every node has the whole of it, so that any of them may go for good. It is written so often that it takes no more than a
part of the time. When, all ranks agree on, by seconds that they have told each other: clocks of their own would differ.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections import deque
from pathlib import Path

from aura.checkpoint import store
from aura.checkpoint.manifest import NAME, step_of
from aura.checkpoint.newest import age
from aura.cluster.ranks import Ranks
from aura.plan.plan import COPY_BUSY, COPY_EVERY

LEAST = COPY_EVERY
# Of the time: that training waits for a copy, and in which one is being collected and written.
STALL, BUSY = 0.02, COPY_BUSY
KNOWN = 10  # steps of an attempt, before it is known how long one takes


class MemoryCopy:
    """Every rank has one, and asks it after the same steps."""

    def __init__(self, directory: Path, ranks: Ranks, save_every: int, step: int) -> None:
        """`step`: after which the attempt goes on."""
        self.saver = store.Saver(directory, keep=1, keep_every=0, keep_best=False)
        self.ranks, self.save_every = ranks, save_every
        self.first_plan = step + KNOWN
        self.next: int | None = None
        self.seconds: deque[float] = deque(maxlen=31)  # of steps
        self.stall = self.busy = 0.0  # seconds, of the last copy: the mean of all ranks

    def is_due(self, step: int, seconds: float, whole: bool) -> bool:
        """After step number `step`, which has taken so long; whole: with the same parameters on all ranks. All ranks
        ask."""
        self.seconds.append(seconds)
        if step == self.first_plan:
            self.plan(step)
        return whole and self.next is not None and step >= self.next

    def plan(self, step: int) -> None:
        """When the next one is, after a copy or a checkpoint at `step`. Never, where those on the disks come as often.
        All ranks have to call this."""
        if not self.seconds:
            return
        (total,) = self.ranks.total([statistics.median(self.seconds)])
        apart = max(LEAST, self.stall / STALL, self.busy / BUSY)
        steps = math.ceil(apart / max(total / self.ranks.world_size, 1e-6))
        self.next = step + steps if 2 * steps <= self.save_every else None

    def cost(self, stall: float, busy: float) -> None:
        """Seconds, summed over the ranks."""
        self.stall, self.busy = stall / self.ranks.world_size, busy / self.ranks.world_size

    def fits(self, size: int, saves: bool) -> bool:
        """Has every node that writes it room for a copy of so many bytes beside the last one, and for the numbers that
        it is made of? All ranks have to ask."""
        lacks = saves and not (store.has_room(2 * size) and _free(self.saver.directory) > size)
        return self.ranks.total([float(lacks)]) == [0.0]


def _free(directory: Path) -> int:
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(exist_ok=True)
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def directory_of(memory: str, run: str) -> Path | None:
    """Where copies of a run are, in the directory that AURA_MEMORY names; None where it names none."""
    return Path(memory, run) if memory else None


def places(disk: Path, memory: Path | None) -> list[Path]:
    """Where this rank may hold checkpoints of the run."""
    return [disk, memory] if memory else [disk]


def forget(directory: Path | None) -> None:
    """The run's checkpoints are on the disks, or need the memory."""
    if directory:
        for path in directory.glob("*"):
            store.remove(path)
        shutil.rmtree(directory, ignore_errors=True)


def tidy(directory: Path, step: int, number: int) -> None:
    """Before training goes on after `step` of attempt `number`: what is newer, or of an attempt that the others have
    left behind, goes."""
    for path in directory.glob("*"):
        if not NAME.fullmatch(path.name) or step_of(path) > step or age(path)[0] > number:
            store.remove(path)
