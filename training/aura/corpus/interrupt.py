"""SIGINT and SIGTERM end a preparation soon, whatever the main thread is doing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 0.7  # seconds in which the main thread can end by itself


@contextmanager
def interruptible(leave: Callable[[], None]) -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this block, SIGTERM SystemExit; `leave` is called before they go on.

    Python raises neither while the main thread is in a library's call (training a tokenizer takes minutes), and
    worker processes are waited for. After GRACE seconds another thread calls `leave` in its place and ends the
    process with the same code; the libraries' long calls let other threads run.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    leaving = threading.Lock()  # held by the one that calls `leave`
    ended = threading.Event()

    def insist() -> None:
        while (received := os.read(reader, 1)) and received[0] not in SIGNALS:
            pass
        if not received or ended.wait(GRACE):
            return
        if leaving.acquire(blocking=False):
            leave()
            os._exit(128 + received[0])

    thread = threading.Thread(target=insist, name="interrupt", daemon=True)
    thread.start()
    descriptor_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handler_before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if not leaving.acquire(blocking=False):
            thread.join()  # it ends the process
        leave()
        raise
    finally:
        signal.signal(signal.SIGTERM, handler_before)
        signal.set_wakeup_fd(descriptor_before)
        ended.set()
        os.close(writer)
        thread.join()
        os.close(reader)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
