"""How long this rank computes in a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from aura.cluster.activity import Activity


class Moment(NamedTuple):
    clock: float  # the host's [s]
    event: torch.Event | None  # the device comes by here, some time after the host
    waited: float  # for other ranks until here [s]


class Meter:
    """A GPU's own clock is read one step later, when the host has waited for its numbers anyway."""

    def __init__(self, device: torch.device, activity: Activity) -> None:
        self.device, self.activity = device, activity
        # Beginning and end of every stretch of a step. With a delay a step begins before the one before it is settled.
        self.steps: deque[list[Moment]] = deque(maxlen=2)

    def begin_step(self) -> None:
        self.steps.append([self._now()])

    def end_step(self) -> None:
        self.steps[-1].append(self._now())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What follows is not the computing of this step."""
        self.end_step()
        yield
        self.steps[-1].append(self._now())

    def take(self) -> float:
        """Seconds of the step that has been settled just now, without waiting for others."""
        moments = self.steps.popleft()
        return sum(map(_seconds, moments[::2], moments[1::2]))

    def _now(self) -> Moment:
        event = None
        if self.device.type != "cpu":
            event = torch.Event(self.device, enable_timing=True)
            event.record()
        return Moment(time.perf_counter(), event, self.activity.waited)


def _seconds(begin: Moment, end: Moment) -> float:
    waited = end.waited - begin.waited
    if begin.event is None or end.event is None:
        return end.clock - begin.clock - waited
    # While the host waits for others, the device has nothing to do.
    return begin.event.elapsed_time(end.event) / 1000 - waited
