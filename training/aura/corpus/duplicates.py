"""Documents that occur twice, to the byte: only the first is written.

A set holds the 64-bit hash of every document (aura/corpus/encode.py), about 80 bytes each. Two of ten million different
documents have the same one with a probability of three in a million.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aura.durable import flush
from aura.errors import DataError


class Seen:
    """The hashes, also in a file from which a preparation that was interrupted has them again."""

    def __init__(self, path: Path, count: int = 0) -> None:
        """`count`: of hashes, by the journal. Raises DataError where the file has fewer."""
        self.path = path
        with path.open("r+b" if count and path.is_file() else "wb") as file:
            hashes = np.frombuffer(file.read(8 * count) if count else b"", "<u8")
            if len(hashes) < count:
                raise DataError("shorter_than_journal", path=path, directory=path.parent)
            file.truncate(8 * count)
        self.hashes: set[int] = set(hashes.tolist())
        self.unwritten: list[int] = []

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these documents are new."""
        new = []
        for one in hashes.tolist():
            new.append(one not in self.hashes)
            if new[-1]:
                self.hashes.add(one)
                self.unwritten.append(one)
        return np.array(new, np.bool_)

    def flush(self) -> None:
        """Raises OSError."""
        with self.path.open("ab") as file:
            file.write(np.array(self.unwritten, "<u8").tobytes())
        flush(self.path)
        self.unwritten = []
