"""Copies of runs in object storage. There is no renaming there, so what makes a thing valid goes last and leaves first:
a checkpoint's manifest, the config.json of an exported model.

One listing per round says what is there. Objects of a checkpoint that came before somebody was interrupted are known by
the checksum that they were sent with, and are not sent again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from aura.checkpoint import manifest
from aura.copies.copy_runs import Pace, may_go
from aura.corpus.corpus import sha256_of
from aura.storage.address import Address
from aura.storage.bucket import Bucket, Entry
from aura.texts import console

CONFIG = "config.json"  # without it transformers sees no model
ABANDONED = timedelta(days=1)  # objects without a manifest: nobody is sending the rest of them any more


@dataclass
class Runs:
    """A Target (copy_runs.py). Sizes have no limit but the provider's."""

    where: Address
    pace: Pace

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(self.where)

    @cached_property
    def there(self) -> dict[str, Entry]:
        return self.bucket.entries(self.where)

    def no_room_for(self, path: Path, name: str, size: int) -> str:
        return ""

    def has_checkpoint(self, name: str, files: dict[str, Any], content: bytes) -> bool:
        entry = self.there.get(f"{name}/{manifest.MANIFEST}")
        sizes = {file: there.size for file in files if (there := self.there.get(f"{name}/{file}"))}
        if entry is None or sizes != {file: said["bytes"] for file, said in files.items()}:
            return False
        # The tag of an object that was sent at once is its MD5, except where the provider encrypts in its own way.
        if entry.etag == hashlib.md5(content, usedforsecurity=False).hexdigest():
            return True
        return self.bucket.read(self.where / name / manifest.MANIFEST) == content

    def put_checkpoint(self, path: Path, name: str, files: dict[str, Any], content: bytes) -> None:
        final = self.where / name
        if f"{name}/{manifest.MANIFEST}" in self.there:  # of an attempt that was given up
            for file, entry in files.items():  # it is good, and stays where this one is not
                _check(sha256_of(path / file) == entry["sha256"], file)
            self.bucket.remove([final / manifest.MANIFEST])
        for file, entry in files.items():
            if not self.bucket.holds(final / file, entry["bytes"], entry["sha256"]):
                self._forget()
                _check(self.bucket.upload(path / file, final / file, entry["sha256"], self.pace.passed), file)
        self._forget()
        self.bucket.write(final / manifest.MANIFEST, content)

    def read(self, name: str) -> bytes | None:
        return self.bucket.read(self.where / name)

    def write(self, name: str, content: bytes) -> None:
        self.bucket.write(self.where / name, content)

    def has_file(self, path: Path, name: str) -> bool:
        """Of this size, and written there after it was written here."""
        entry, here = self.there.get(name), path.stat()
        return (
            entry is not None
            and entry.size == here.st_size
            and entry.changed >= datetime.fromtimestamp(here.st_mtime, UTC) - timedelta(seconds=2)
        )

    def put_file(self, path: Path, name: str) -> None:
        content = path.read_bytes()
        self._forget()
        self.write(name, content)
        self.pace.passed(len(content))

    def put_model(self, files: list[Path], name: str) -> None:
        if f"{name}/{CONFIG}" in self.there:
            self.bucket.remove([self.where / name / CONFIG])
        self._forget()
        for file in sorted(files, key=lambda path: path.name == CONFIG):
            sha256, address = sha256_of(file), self.where / name / file.name
            # Also what has the right bytes is sent again: its time shall say that it is the one of now.
            if not self.bucket.upload(file, address, sha256, self.pace.passed):
                raise OSError(console.text("other_checksum", file=file.name))  # written meanwhile

    def tidy(self, name: str, local: set[str]) -> None:
        long_ago = datetime.now(UTC) - ABANDONED
        for checkpoint, files in self._found(name).items():
            is_old = max(entry.changed for entry in files.values()) < long_ago
            if is_old and manifest.MANIFEST not in files and checkpoint not in local:
                self._remove(f"{name}/{checkpoint}", files)

    def rotate(self, name: str, keep: int, local: set[str], newest: manifest.Writer) -> None:
        """The newest by their arrival: after a run has gone back to an older step, later steps are older."""
        found = self._found(name)
        whole = [checkpoint for checkpoint, files in found.items() if manifest.MANIFEST in files]
        whole.sort(key=lambda checkpoint: found[checkpoint][manifest.MANIFEST].changed, reverse=True)
        for checkpoint in whole[keep:]:
            name_there = f"{name}/{checkpoint}"
            if checkpoint not in local and may_go(self.read(f"{name_there}/{manifest.MANIFEST}"), newest):
                self._remove(name_there, found[checkpoint])

    def _found(self, name: str) -> dict[str, dict[str, Entry]]:
        """What is there of checkpoints below `name`, and of their files."""
        found: dict[str, dict[str, Entry]] = {}
        for key, entry in self.there.items():
            checkpoint, _, file = key.removeprefix(f"{name}/").partition("/")
            if key.startswith(f"{name}/") and manifest.NAME.fullmatch(checkpoint) and file:
                found.setdefault(checkpoint, {})[file] = entry
        return found

    def _remove(self, name: str, files: dict[str, Entry]) -> None:
        in_order = sorted(files, key=lambda file: file != manifest.MANIFEST)
        self._forget()
        self.bucket.remove([self.where / name / file for file in in_order])

    def _forget(self) -> None:
        """The listing is not true any more."""
        self.__dict__.pop("there", None)


def _check(is_right: bool, file: str) -> None:
    if not is_right:
        raise manifest.Damaged(console.text("other_checksum", file=file))
