"""What runs have finished, on another disk too: checkpoints, `final/`, and what both need to be used.

    <target>/<run>/checkpoints/checkpoint-step-200/    with the same bytes, as its manifest says
    <target>/<run>/final/
    <target>/<run>/tokenizer.json …                    small files of the run

Made for a disk that may go away at any moment (NFS, SMB) and for a unit that runs every few minutes: what is there is
left alone, what was interrupted goes on where it stopped, and a name appears only when everything under it is on the
disk. Whoever trains waits for none of it. Standard library only: it starts at once and takes little memory.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aura.checkpoint import manifest
from aura.durable import flush
from aura.texts import console

FINAL = "final"
SMALL = ("tokenizer.json", "config.json", "model_config.json", "done.json", "training_log.csv")
CHUNK = 8 << 20  # bytes that are written, and on the other disk, before the next ones are read


class Later(Exception):
    """Nothing can be written there for now; the text says why."""


@dataclass
class Pace:
    """Lets through `rate` bytes per second at most; 0 for as many as come."""

    rate: float
    _free_at: float = field(default_factory=time.monotonic)

    def passed(self, count: int) -> None:
        """Wait until the next bytes may go."""
        if self.rate:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self.rate
            time.sleep(max(0.0, self._free_at - now))


@dataclass(frozen=True)
class Copier:
    """`keep`: checkpoints that stay on the target when the run itself has let them go. `leave_free`: bytes."""

    target: Path
    keep: int
    leave_free: float
    pace: Pace
    say: Callable[[str], None]
    # In the names of what is not complete yet: another node may be copying the same.
    node: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])

    def copy_all(self, runs: Path) -> None:
        """Every run of which rank 0 was here: the others' checkpoints are the same. Raises Later."""
        if not runs.is_dir():
            return
        for run in sorted(runs.iterdir()):
            if (run / "rank-0").is_dir() and not run.is_symlink():
                try:
                    self._copy_run(run, self.target / run.name)
                except OSError as error:
                    raise Later(console.text("not_copied_now", run=run.name, error=error)) from None

    def _copy_run(self, run: Path, target: Path) -> None:
        local = sorted(manifest.checkpoints(run / "checkpoints"), key=manifest.step_of, reverse=True)
        whole = all([self._copy_checkpoint(path, target / "checkpoints") for path in local])
        for path in run.iterdir():
            if path.name in SMALL and not _same(path, target / path.name):
                self._copy_file_whole(path, target / path.name)
        if (run / FINAL).is_dir():
            self._copy_final(run / FINAL, target / FINAL)
        if local and whole:
            self._rotate(target / "checkpoints", {path.name for path in local})

    def _copy_checkpoint(self, path: Path, directory: Path) -> bool:
        """Whether it is there now."""
        try:
            entries = manifest.read(path)["files"]
            text = (path / manifest.MANIFEST).read_bytes()
        except (OSError, manifest.Damaged) as reason:
            if path.is_dir():  # else the run has let it go meanwhile
                self.say(console.text("damaged_not_copied", path=path, reason=reason))
            return False
        final = directory / path.name
        if _bytes_of(final / manifest.MANIFEST) == text:
            return True
        if not self._has_room(directory, sum(entry["bytes"] for entry in entries.values()), path):
            return False
        began, temporary = time.monotonic(), self._temporary(final)
        temporary.mkdir(parents=True, exist_ok=True)
        for name, entry in entries.items():
            try:
                digest = self._copy_file(path / name, temporary / name)
            except FileNotFoundError:
                if (path / name).exists():
                    raise
                return False  # the run has let it go meanwhile
            if digest != entry["sha256"]:
                shutil.rmtree(temporary)
                differs = console.text("other_checksum", file=name)
                self.say(console.text("damaged_not_copied", path=path, reason=differs))
                return False
        (temporary / manifest.MANIFEST).write_bytes(text)
        self._publish(temporary, final)
        size = sum(entry["bytes"] for entry in entries.values())
        self.say(
            console.text("copied_in", path=final, megabytes=size / 1e6, seconds=time.monotonic() - began)
        )
        return True

    def _copy_final(self, path: Path, final: Path) -> None:
        """An exported model has no manifest: names, sizes and times say whether it is the same."""
        files = [file for file in path.iterdir() if file.is_file()]
        if final.is_dir() and all(_same(file, final / file.name) for file in files):
            return
        if not self._has_room(final.parent, sum(file.stat().st_size for file in files), path):
            return
        temporary = self._temporary(final)
        temporary.mkdir(parents=True, exist_ok=True)
        for file in files:
            self._copy_file(file, temporary / file.name)
            _take_time(file, temporary / file.name)
        self._publish(temporary, final)
        self.say(console.text("copied", path=final))

    def _copy_file_whole(self, path: Path, final: Path) -> None:
        temporary = self._temporary(final)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        self._copy_file(path, temporary)
        _take_time(path, temporary)
        temporary.replace(final)

    def _copy_file(self, path: Path, target: Path) -> str:
        """The SHA-256 of what was read, and of what the target has now, on its disk.

        What is in the target already, from a copy that was interrupted, is compared and written only where it differs.
        """
        digest, offset = hashlib.sha256(), 0
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with path.open("rb") as source:
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
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return digest.hexdigest()

    def _publish(self, temporary: Path, final: Path) -> None:
        """Everything in there is on the disk: now it gets its name, in place of what had it before."""
        for path in temporary.iterdir():
            flush(path)
        _flush_directory(temporary)
        aside = self._temporary(final, "old-")
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        temporary.rename(final)
        _flush_directory(final.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _temporary(self, final: Path, what: str = "") -> Path:
        return final.with_name(f".{what}{final.name}.{self.node}")

    def _has_room(self, directory: Path, size: int, path: Path) -> bool:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if size + self.leave_free > free:
            self.say(
                console.text(
                    "no_room_for_copy",
                    path=path,
                    target=self.target,
                    free=free / 1e9,
                    needs=size / 1e9,
                    spare=self.leave_free / 1e9,
                )
            )
        return size + self.leave_free <= free

    def _rotate(self, directory: Path, local: set[str]) -> None:
        """Once everything that the run keeps is here: what it keeps and the newest `keep` stay.

        The newest by their arrival: after a run has gone back to an older step, later steps are older.
        """
        there = sorted(manifest.checkpoints(directory), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in there[self.keep :]:
            if path.name not in local:
                path.rename(self._temporary(path, "old-"))
        for path in directory.glob(f".*.{self.node}"):
            if path.name.startswith(".old-") or path.name[1:].removesuffix(f".{self.node}") not in local:
                shutil.rmtree(path, ignore_errors=True)


def _write(descriptor: int, chunk: bytes, offset: int) -> None:
    rest = memoryview(chunk)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def _flush_directory(path: Path) -> None:
    try:
        flush(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file servers know it of files only
            raise


def _take_time(path: Path, target: Path) -> None:
    status = path.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _same(path: Path, target: Path) -> bool:
    """Size and time, to the 2 seconds that the coarsest file systems know."""
    try:
        here, there = path.stat(), target.stat()
    except FileNotFoundError:
        return False
    return here.st_size == there.st_size and abs(here.st_mtime - there.st_mtime) <= 2


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
