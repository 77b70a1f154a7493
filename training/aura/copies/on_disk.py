"""Copies of runs on another disk (NFS, SMB, USB): a name appears there only when everything under it is on the disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aura.checkpoint import manifest
from aura.copies.copy_runs import Pace, may_go
from aura.durable import publish
from aura.texts import console

CHUNK = 8 << 20  # bytes that are written, and on the other disk, before the next ones are read


@dataclass(frozen=True)
class Disk:
    """A Target (copy_runs.py). `leave_free`: bytes."""

    where: Path
    leave_free: float
    pace: Pace
    # In the names of what is not complete yet: another node may be copying the same.
    node: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])

    def no_room_for(self, path: Path, name: str, size: int) -> str:
        directory = (self.where / name).parent
        directory.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary(self.where / name)
        if temporary.is_dir():  # what was interrupted goes on
            size -= sum(file.stat().st_size for file in temporary.iterdir())
        free = shutil.disk_usage(directory).free
        if size + self.leave_free <= free:
            return ""
        values = {"free": free / 1e9, "needs": size / 1e9, "spare": self.leave_free / 1e9}
        return console.text("no_room_for_copy", path=path, target=self.where, **values)

    def has_checkpoint(self, name: str, files: dict[str, Any], content: bytes) -> bool:
        there = self.where / name
        try:
            return (there / manifest.MANIFEST).read_bytes() == content and all(
                (there / file).stat().st_size == entry["bytes"] for file, entry in files.items()
            )
        except FileNotFoundError:
            return False

    def put_checkpoint(self, path: Path, name: str, files: dict[str, Any], content: bytes) -> None:
        final = self.where / name
        temporary = self._temporary(final)
        temporary.mkdir(parents=True, exist_ok=True)
        for file, entry in files.items():
            if self._copy_file(path / file, temporary / file) != entry["sha256"]:
                shutil.rmtree(temporary)
                raise manifest.Damaged(console.text("other_checksum", file=file))
        (temporary / manifest.MANIFEST).write_bytes(content)
        publish(temporary, final)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.where / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        temporary = self._temporary(self.where / name)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(self.where / name)

    def has_file(self, path: Path, name: str) -> bool:
        """Size and time, to the 2 seconds that the coarsest file systems know."""
        try:
            here, there = path.stat(), (self.where / name).stat()
        except FileNotFoundError:
            return False
        return here.st_size == there.st_size and abs(here.st_mtime - there.st_mtime) <= 2

    def put_file(self, path: Path, name: str) -> None:
        temporary = self._temporary(self.where / name)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        self._copy_file(path, temporary, with_time=True)
        temporary.replace(self.where / name)

    def put_model(self, files: list[Path], name: str) -> None:
        temporary = self._temporary(self.where / name)
        temporary.mkdir(parents=True, exist_ok=True)
        for file in files:
            self._copy_file(file, temporary / file.name, with_time=True)
        publish(temporary, self.where / name)

    def _copy_file(self, path: Path, target: Path, with_time: bool = False) -> str:
        """The SHA-256 of what was read, and of what the target has now, on its disk.

        What is in the target already, from a copy that was interrupted, is compared and written only where it differs.
        """
        digest, offset = hashlib.sha256(), 0
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with path.open("rb") as source:
                # Of what is read: its name may be another file's by the end.
                times = os.fstat(source.fileno())
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    if os.pread(descriptor, len(chunk), offset) != chunk:
                        _write(descriptor, chunk, offset)
                        os.fsync(descriptor)
                    offset += len(chunk)
                    self.pace.passed(len(chunk))
                # The memory is needed for the corpus that is trained on.
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.ftruncate(descriptor, offset)
            os.fsync(descriptor)
            if with_time:
                os.utime(descriptor, ns=(times.st_atime_ns, times.st_mtime_ns))
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return digest.hexdigest()

    def _temporary(self, final: Path, what: str = "") -> Path:
        return final.with_name(f".{what}{final.name}.{self.node}")

    def rotate(self, name: str, keep: int, local: set[str], newest: manifest.Writer) -> None:
        """The newest by their arrival: after a run has gone back to an older step, later steps are older."""
        there = manifest.checkpoints(self.where / name)
        for path in sorted(there, key=lambda path: path.stat().st_mtime, reverse=True)[keep:]:
            said = f"{name}/{path.name}/{manifest.MANIFEST}"
            if path.name not in local and may_go(self.read(said), newest):
                path.rename(self._temporary(path, "old-"))
        self.tidy(name, local)

    def tidy(self, name: str, local: set[str]) -> None:
        for path in (self.where / name).glob(f".*.{self.node}"):
            if path.name.startswith(".old-") or path.name[1:].removesuffix(f".{self.node}") not in local:
                shutil.rmtree(path, ignore_errors=True)


def _write(descriptor: int, chunk: bytes, offset: int) -> None:
    rest = memoryview(chunk)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
