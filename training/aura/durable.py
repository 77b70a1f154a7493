"""What was written is on the disk, not only in memory, when a power cut comes; and whole, whoever reads it when."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: dict[str, Any], flushed: bool = False) -> None:
    """As JSON. Whoever reads sees the old file or the new one, never half of one. flushed: a power cut does not lose
    it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if flushed:
            flush(temporary)
        temporary.replace(path)
        if flushed:
            flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
