"""SIGTERM, SIGINT and SIGHUP, for a process that must save before it leaves."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from aura.errors import GpuFault
from aura.strategy.interface import STOP, SUSPECT


class StoppedWhileWaiting(BaseException):
    """A signal came while nothing was under way that would have to be saved."""


class StopSignal:
    """SIGTERM, SIGINT, and SIGHUP, which comes when the terminal is closed.

    All ranks agree on it at the end of a step; while waiting for the process group it acts at once.
    """

    def __init__(self, notice: str) -> None:
        """notice: printed when the signal has to wait for the end of a step, which may take minutes on a processor."""
        self.notice = f"{notice}\n".encode()
        self.requested = False
        self.unhealthy: GpuFault | None = None  # what the watcher has found meanwhile
        self.back: int | None = None  # a rank that wants to take part again
        self.waiting = True
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)

    @property
    def weight(self) -> int:
        """What all ranks are told at the end of a step; 0: go on."""
        return SUSPECT if self.unhealthy else STOP if self.requested or self.back is not None else 0

    def comes_within(self, seconds: float) -> bool:
        """Whether somebody asks for it, this rank too, in so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.requested and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.requested

    def for_one_that_is_back(self, rank: int) -> None:
        self.back = rank

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        if self.waiting:
            self.waiting = False
            raise StoppedWhileWaiting
        if first:
            # Not by print: the signal may have come inside one, which cannot be entered again.
            with suppress(OSError):  # whoever read is gone
                os.write(1, self.notice)
