"""s3://bucket/directory: what a person types where a path could stand. Standard library only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from aura.errors import ConfigError

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # also s3:/…, which a path makes of s3://…
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Address:
    """An object, or what stands before the names of several: object storage has no directories."""

    bucket: str
    key: str  # with no slash at its ends; never empty, so that nobody works on a whole bucket

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> Address:
        return Address(self.bucket, f"{self.key}/{name}")

    @property
    def parent(self) -> Address:
        """Raises ConfigError where that is the bucket itself."""
        return _address(str(self).rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]


def place(word: str) -> Path | Address:
    """What a person has named: a path of this machine, or an address. Raises ConfigError."""
    return _address(word) if SCHEME.match(word) else Path(word)


def appears_at_once(path: Path) -> Path:
    """Where a directory is going to get its name by one rename: absolute, without links. Raises ConfigError."""
    path = path.resolve()
    if os.path.ismount(path) or path == Path.cwd():
        raise ConfigError("output_stays_there", path=path)
    return path


def _address(word: str) -> Address:
    if not word.startswith("s3://"):
        raise ConfigError("no_s3_address", word=word)
    bucket, _, key = word.removeprefix("s3://").partition("/")
    parts = [part for part in key.split("/") if part]
    if not BUCKET.fullmatch(bucket) or {".", ".."} & set(parts):
        raise ConfigError("no_s3_address", word=word)
    if not parts:
        raise ConfigError("whole_bucket", word=word.rstrip("/"))
    return Address(bucket, "/".join(parts))
