"""What was written is on the disk, not only in memory, when a power cut comes; and whole, whoever reads it when."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

LOST = "lost+found"  # where ext4 puts what it finds, at the top of a disk: root's alone, and nobody's data


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file servers know it of files only.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: dict[str, Any], flushed: bool = False) -> None:
    """As JSON, see `replace_text`."""
    replace_text(path, json.dumps(content, indent=1) + "\n", flushed)


def replace_text(path: Path, content: str, flushed: bool = False) -> None:
    """Whoever reads sees the old file or the new one, never half of one. flushed: a power cut does not lose it. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        if flushed:
            flush(temporary)
        temporary.replace(path)
        if flushed:
            flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, final: Path) -> None:
    """A directory of files, whole: on the disk first, and then under its name, in place of what had it. Raises
    OSError."""
    for file in temporary.iterdir():
        flush(file)
    flush(temporary)
    aside = temporary.with_name(f".old-{temporary.name}")  # who cleans up after a power cut knows both
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    flush(final.absolute().parent)
    shutil.rmtree(aside, ignore_errors=True)
