"""What Ctrl-C and `kill` do to a lab command."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from aura_lab import host


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and `kill` end an `up` in the same way: as an exception, so that it cleans up. Once is enough."""
    stopped = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            host.say("still cleaning up, a moment")
            return
        stopped = True
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    with _handlers(stop):
        yield


@contextmanager
def uninterruptible() -> Iterator[None]:
    """Cleaning up takes seconds and is not left half done."""

    def refuse(number: int, _: FrameType | None) -> None:
        host.say("still cleaning up, a moment")

    with _handlers(refuse):
        yield


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
