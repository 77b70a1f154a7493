"""What this machine keeps of what it has fetched: $AURA_CACHE, else $XDG_CACHE_HOME/aura, else ~/.cache/aura.

Anything there may be deleted when nobody uses it: it is fetched again. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from aura.errors import ConfigError, DataError, why_not_written
from aura.storage.address import Address
from aura.texts.console import text

SPARE = 100 << 20  # bytes that stay free


def root() -> Path:
    """Raises ConfigError where nothing names a place: a user need not have a home."""
    if named := os.environ.get("AURA_CACHE"):
        return Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "aura")
    try:
        return Path.home() / ".cache/aura"
    except RuntimeError:
        raise ConfigError("no_home_for_cache") from None


def directory_of(kind: str, address: Address) -> Path:
    """Where what lies at an address is kept. Two addresses never share a directory, nor one another's."""
    return root() / kind / quote(str(address), safe="")


@contextmanager
def alone_in(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process at a time fetches into it: the ranks of one machine all want the same. Raises DataError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(text("waiting_for_fetch", path=directory))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError("cache_full", path=directory) from None
        where = error.filename or directory
        raise DataError("cache_not_written", path=where, error=why_not_written(error)) from None


def check_room(directory: Path, needed: int, address: Address) -> None:
    """Before the first of so many bytes comes. Raises DataError."""
    free = shutil.disk_usage(directory).free
    if needed + SPARE > free:
        raise DataError(
            "no_room_to_fetch", address=address, needs=needed / 1e9, path=directory, free=free / 1e9
        )
