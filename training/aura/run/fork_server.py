"""One process per rank that has imported torch, and starts each attempt as its child: where all start again because one
of them went or came, they do so at once. (Five that import torch on two cores take 5 s.)

The unit of a rank asks for it (AURA_FORK_SERVER). Nothing here computes or opens a card: what an attempt breaks is gone
with its process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from aura.errors import EXIT_TEMPORARY

VARIABLE = "AURA_FORK_SERVER"
CARD = "AURA_CARD"  # what start-rank has found
# Seconds: who ends earlier is started again by systemd, which pauses if that happens often. Where a PC is left out and
# soon back, an attempt lasts GRACE_SILENT and STEADY (aura/cluster) at least.
SOON = 10.0
# The last one is the watchdog's, by systemd.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT)
PR_SET_PDEATHSIG = 1


def is_wanted() -> bool:
    return os.environ.get(VARIABLE) == "1"


def serve(attempt: Callable[[], int]) -> int:
    """The exit code of the last attempt: of one that does not ask to be started again, was told to end, or ended soon.
    Where a signal ended it, this process ends by the same one. (In a child: the exit code of its attempt.)"""
    import aura.run.attempt  # noqa: F401 - torch, and all that a rank needs

    gc.collect()
    gc.freeze()  # what is never collected is never copied
    child, code, told = 0, EXIT_TEMPORARY, False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        with suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.getsignal(number) for number in PASSED_ON}
    while True:
        began, own = time.monotonic(), os.getpid()
        with _later(PASSED_ON):
            if told:  # between two attempts: nobody else hears of it
                return code
            child = os.fork()
            for number in PASSED_ON:
                signal.signal(number, pass_on if child else before[number])
        if child == 0:
            _end_with(own)
            return attempt()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its helpers
        if code < 0:
            _end_by(signal.Signals(-code))
        if code != EXIT_TEMPORARY or time.monotonic() - began < SOON or _card_is_another():
            return code


@contextmanager
def _later(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """They come when it is clear who gets them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _card_is_another() -> bool:
    """Has the node's address left the network card on which start-rank found it? There it is looked for again."""
    from aura.cluster.rendezvous import card_of

    found = os.environ.get(CARD)
    return bool(found) and card_of(os.environ.get("AURA_ADDRESS", "")) != found


def _end_with(parent: int) -> None:
    """This child, which leads a group of its own, does not outlive its parent."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_TEMPORARY)


def _end_by(number: signal.Signals) -> None:
    with suppress(OSError):  # SIGKILL takes no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
