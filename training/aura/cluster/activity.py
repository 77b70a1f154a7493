"""What a rank's main thread is doing, and since when: a thread that beats says nothing about it.

Standard library only.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aura.texts.console import text

COMPUTING, WAITING, ELSEWHERE = "computing", "waiting", "elsewhere"
UNCOUNTED = 3  # first steps of an attempt: they compile kernels, fill caches and wait for late ranks
# A step counts as stalled after so many usual ones, and not before so many seconds: other programs may hold up a short
# one. Where an exchange has failed, the others have waited for somebody in vain already.
TIMES, LEAST = 5.0, 30.0
TIMES_HURT, LEAST_HURT = 1.5, 6.0


@dataclass(frozen=True)
class Report:
    """What one rank says of itself. Seconds are its own: the clocks of two nodes are never compared."""

    step: int
    doing: str  # inside a step COMPUTING, or WAITING for other ranks; ELSEWHERE: between two, or before the first
    seconds: float  # since the step began
    usual: float  # of a step, the median; 0 while it is not known

    def is_overdue(self, hurt: bool = False) -> bool:
        """hurt: an exchange of a rank has failed."""
        limit = max(LEAST_HURT, TIMES_HURT * self.usual) if hurt else max(LEAST, TIMES * self.usual)
        return self.doing != ELSEWHERE and self.usual > 0 and self.seconds > limit

    def __str__(self) -> str:
        return text("step_not_ended", step=self.step, seconds=self.seconds, usual=self.usual)


class Activity:
    """The main thread tells it where it is; other threads ask.

    Only a step has a limit, and only once it is known how long a step takes: starting, compiling, validating and saving
    may take as long as they need. Time that the machine sleeps does not count.
    """

    def __init__(self) -> None:
        self.alone = True  # nobody else watches this rank
        self._durations: deque[float] = deque(maxlen=31)
        self._steps = 0  # of this attempt
        self._usual = 0.0
        self.waited = 0.0  # seconds, for other ranks
        self._now = (0, ELSEWHERE, time.monotonic())
        self._computes_beside: Callable[[], bool] = lambda: False

    def begin_step(self, step: int) -> None:
        """Step number `step` (from 1) begins."""
        self._now = (step, COMPUTING, time.monotonic())

    @contextmanager
    def waiting(self, computes_beside: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """What follows needs the other ranks. Who has waited in vain is not to blame afterwards either.

        computes_beside: whether another thread of this rank still computes what is waited for: who hangs there is
        named.
        """
        before, began = self._now, time.monotonic()
        step, doing, since = before
        self._computes_beside = computes_beside
        self._now = (step, WAITING if doing == COMPUTING else doing, since)
        yield
        self._now = before
        self.waited += time.monotonic() - began

    def expect_delay(self) -> None:
        """A step may compile something: what is usual says nothing about this one."""
        self._usual = 0.0

    def end_step(self) -> None:
        step, _, since = self._now
        self._steps += 1
        if self._steps > UNCOUNTED:
            self._durations.append(time.monotonic() - since)
            self._usual = statistics.median(self._durations)
        self._now = (step, ELSEWHERE, time.monotonic())

    def report(self) -> Report:
        step, doing, since = self._now
        if doing == WAITING and self._computes_beside():
            doing = COMPUTING
        return Report(step, doing, time.monotonic() - since, self._usual)


def stalled(reports: list[Report | None], hurt: bool = False) -> list[int]:
    """Whose main thread hangs, as places in `reports`; all of them when the exchange itself does; [] when nobody.

    Who waits for a rank that is validating or saving is not to blame, and neither is that rank.
    """
    overdue = [dist_env for dist_env, one in enumerate(reports) if one and one.is_overdue(hurt)]
    guilty = [dist_env for dist_env in overdue if (one := reports[dist_env]) and one.doing == COMPUTING]
    return guilty or (overdue if len(overdue) == len(reports) else [])
