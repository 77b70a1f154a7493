"""What a rank's main thread is doing, and since when: a thread that beats says nothing about it.

Standard library only.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

COMPUTING, EXCHANGING, ELSEWHERE = "computing", "exchanging", "elsewhere"
UNCOUNTED = 3  # first steps of an attempt: they compile kernels, fill caches and wait for late ranks
TIMES = 5.0  # the usual step, after which a step counts as stalled
LEAST = 30.0  # seconds before which no step does: other programs may hold up a short one


@dataclass(frozen=True)
class Report:
    """What one rank says of itself. Seconds are its own: the clocks of two nodes are never compared."""

    step: int
    doing: str  # COMPUTING or EXCHANGING inside a step; ELSEWHERE: between two, or before the first
    seconds: float  # since the step began
    usual: float  # of a step, the median; 0 while it is not known

    @property
    def overdue(self) -> bool:
        return self.doing != ELSEWHERE and self.usual > 0 and self.seconds > max(LEAST, TIMES * self.usual)

    def __str__(self) -> str:
        return f"step {self.step} has not ended for {self.seconds:.0f} s (usually {self.usual:.2g} s)"


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
        self._now = (0, ELSEWHERE, time.monotonic())

    def compute(self, step: int) -> None:
        """Step number `step` (from 1) begins: what follows needs no other rank."""
        self._now = (step, COMPUTING, time.monotonic())

    def exchange(self) -> None:
        """The same step goes on with what needs the other ranks."""
        step, _, since = self._now
        self._now = (step, EXCHANGING, since)

    def rest(self) -> None:
        """The step has ended."""
        step, _, since = self._now
        self._steps += 1
        if self._steps > UNCOUNTED:
            self._durations.append(time.monotonic() - since)
            self._usual = statistics.median(self._durations)
        self._now = (step, ELSEWHERE, time.monotonic())

    def report(self) -> Report:
        step, doing, since = self._now
        return Report(step, doing, time.monotonic() - since, self._usual)


def stalled(reports: list[Report | None]) -> list[int]:
    """Whose main thread hangs, as places in `reports`; all of them when the exchange itself does; [] when nobody.

    Who waits for a rank that is validating or saving is not to blame, and neither is that rank.
    """
    guilty = [place for place, one in enumerate(reports) if one and one.overdue and one.doing == COMPUTING]
    if guilty:
        return guilty
    return list(range(len(reports))) if all(one and one.overdue for one in reports) else []
