"""SIGINT and SIGTERM end a preparation soon, whatever the main thread is doing."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 0.7  # seconds in which the main thread can end by itself
LONG_GRACE = 10.0  # while there is a work directory, which it removes first
_directories: list[Path] = []


@contextmanager
def work_directory(path: Path) -> Iterator[None]:
    """It is there in this block only. Removing gigabytes takes a slow disk longer than GRACE."""
    _directories.append(path)
    try:
        shutil.rmtree(path, ignore_errors=True)  # of a preparation that was killed
        path.mkdir(parents=True)
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _directories.remove(path)


def unremoved() -> list[Path]:
    """Work directories that are there still."""
    return [path for path in _directories if path.exists()]


@contextmanager
def interruptible(leave: Callable[[], None]) -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this block, SIGTERM SystemExit; `leave` is called before they go on.

    Python raises neither while the main thread is in a library's call (training a tokenizer takes minutes), and
    worker processes are waited for. After GRACE seconds another thread calls `leave` in its place and ends the
    process with the same code; the libraries' long calls let other threads run. While a work directory is there, it
    waits LONG_GRACE seconds.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    leaving = threading.Lock()  # held by the one that calls `leave`
    ended = threading.Event()

    def insist() -> None:
        while (received := os.read(reader, 1)) and received[0] not in SIGNALS:
            pass
        if not received or ended.wait(GRACE) or (_directories and ended.wait(LONG_GRACE - GRACE)):
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
