"""An URL that a person types where a path could stand. Standard library only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from aura.errors import ConfigError

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # also s3:/…, which a path makes of s3://…
URL = re.compile(r"(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]|https?://[^/\s]+)(/.*)?")


@dataclass(frozen=True)
class Address:
    """A file there, or what stands before the names of several: object storage has no directories."""

    url: str  # with no slash at its end, and more than the bucket or the server

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.url}/{name}")

    @property
    def parent(self) -> Address:
        """Raises ConfigError where that is the bucket itself."""
        return _address(self.url.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def place(word: str) -> Path | Address:
    """What a person has named: a path of this machine, or an address. Raises ConfigError."""
    return _address(word) if SCHEME.match(word) else Path(word)


def directory_here(word: str) -> Path:
    """Raises ConfigError where it is an address."""
    if SCHEME.match(word):
        raise ConfigError("address_not_written", word=word)
    return Path(word)


def appears_at_once(path: Path) -> Path:
    """Where a directory is going to get its name by one rename: absolute, without links. Raises ConfigError."""
    path = path.resolve()
    if os.path.ismount(path) or path == Path.cwd():
        raise ConfigError("output_stays_there", path=path)
    return path


def _address(word: str) -> Address:
    match = URL.fullmatch(word)
    parts = [part for part in (match[2] or "").split("/") if part] if match else []
    if not match or {".", ".."} & set(parts):
        raise ConfigError("no_address", word=word)
    if not parts:
        raise ConfigError("whole_bucket", word=word.rstrip("/"))
    return Address("/".join([match[1], *parts]))
