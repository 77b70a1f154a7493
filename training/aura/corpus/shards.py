"""Token ids on their way to the disk, so that a preparation can be killed at any time and goes on afterwards.

`aura prepare --output X` works in X.partial:

    corpus/        what becomes X by one rename, at the end
    journal.hashes what is written, to know what occurs again (aura/corpus/duplicates.py)
    journal.json   how far it is: the finished shards, how much of the open ones counts, the position in the source
    lock           held while somebody works here

The journal is replaced every COMMIT_SECONDS and with every finished shard, after everything it speaks of is on the
disk. Whoever goes on cuts the open shards to the length in the journal: what came after it is written again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from aura.corpus.encode import Ids
from aura.corpus.interrupt import interruptible
from aura.durable import flush, replace_text
from aura.errors import ConfigError, DataError, why_not_written
from aura.storage.address import appears_at_once
from aura.texts.console import text

SHARD_TOKENS = 100_000_000  # a file of token ids is closed when it reaches this length
COMMIT_SECONDS = 30.0
SPLITS = ("train", "validation")


class ShardWriter:
    """Writes train-00000.bin, train-00001.bin … for the name `train`."""

    def __init__(self, directory: Path, name: str, width: int, state: dict[str, Any] | None) -> None:
        """`width` in bytes per token; `state` is what `state()` gave when the journal was written."""
        state = state or {"entries": [], "documents": 0, "tokens": 0, "text_bytes": 0}
        self.directory, self.name, self.width = directory, name, width
        self.entries: list[dict[str, Any]] = state["entries"]
        self.documents: int = state["documents"]
        for entry in self.entries:
            self._check(directory / entry["name"], entry["bytes"])
        self._open(state["tokens"], state.get("text_bytes"))

    def _open(self, tokens: int = 0, text_bytes: int | None = 0) -> None:
        """`text_bytes`: None where an earlier release has begun this shard and not counted them."""
        self.path = self.directory / f"{self.name}-{len(self.entries):05d}.bin"
        if tokens:
            self._check(self.path, tokens * self.width)
        self.file = self.path.open("r+b" if tokens else "wb")
        self.digest, self.tokens, self.text_bytes = hashlib.sha256(), tokens, text_bytes
        if tokens:
            self.file.truncate(tokens * self.width)
            while chunk := self.file.read(1 << 20):
                self.digest.update(chunk)

    def _check(self, path: Path, size: int) -> None:
        """Raises DataError."""
        if not path.is_file() or path.stat().st_size < size:
            raise DataError("shorter_than_journal", path=path, directory=self.directory.parent)

    def state(self) -> dict[str, Any]:
        counts = {"documents": self.documents, "tokens": self.tokens, "text_bytes": self.text_bytes}
        return {"entries": self.entries, **counts}

    def add(self, ids: Ids, lengths: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> bool:
        """Documents one after another, `sizes` in bytes of text; a shard ends with the first that fills it. Was one
        finished?"""
        finished, begin = False, 0
        ends = np.cumsum(lengths)
        while begin < len(lengths):
            if self.tokens >= SHARD_TOKENS:
                self._finish()
                self._open()
                finished = True
            start = int(ends[begin - 1]) if begin else 0
            # Documents up to the one that fills the shard.
            last = int(np.searchsorted(ends, start + SHARD_TOKENS - self.tokens))
            stop = min(last + 1, len(lengths))
            data = ids[start : int(ends[stop - 1])].tobytes()
            self.file.write(data)
            self.digest.update(data)
            self.tokens += len(data) // self.width
            if self.text_bytes is not None:
                self.text_bytes += int(sizes[begin:stop].sum())
            begin = stop
        self.documents += len(lengths)
        return finished

    def total(self) -> int:
        """Tokens, in all shards."""
        return self.tokens + sum(entry["tokens"] for entry in self.entries)

    def flush(self) -> None:
        self.file.flush()
        flush(self.path)

    def _finish(self) -> None:
        self.flush()
        self.file.close()
        entry = {"name": self.path.name, "tokens": self.tokens, "bytes": self.tokens * self.width}
        counted = {} if self.text_bytes is None else {"text_bytes": self.text_bytes}
        self.entries.append({**entry, **counted, "sha256": self.digest.hexdigest()})

    def close(self) -> list[dict[str, Any]]:
        """Of every shard its entry in meta.json."""
        self._finish()
        if not self.documents:
            self.path.unlink()  # a part of a mixture may have nothing to validate
            return []
        return self.entries


class Workplace:
    """The directory <output>.partial; made by `workplace`."""

    def __init__(self, output: Path) -> None:
        self.output = output.resolve()
        self.path = self.output.with_name(f"{self.output.name}.partial")
        self.corpus = self.path / "corpus"
        self.journal = self.path / "journal.json"
        self.hashes = self.path / "journal.hashes"
        self.lock = self.path / "lock"

    def read_journal(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """What was done before for the same request; None at the beginning. Raises ConfigError, DataError."""
        if not (self.journal.is_file() and self.corpus.is_dir()):
            self.start_again()
            return None
        try:
            journal: dict[str, Any] = json.loads(self.journal.read_text(encoding="utf-8"))
            begun = journal["request"]
        except (ValueError, TypeError, KeyError):
            raise DataError("journal_damaged", file=self.journal, directory=self.path) from None
        if begun == request:
            return journal
        if "revision" in begun and request | {"revision": begun["revision"]} == begun:
            raise ConfigError("newer_commit", path=self.path, revision=begun["revision"])
        if names := _parts_with_newer_commits(begun, request):
            raise ConfigError("newer_commit_of_parts", path=self.path, names=", ".join(names))
        raise ConfigError("unfinished_other_corpus", path=self.path)

    def start_again(self) -> None:
        self.journal.unlink(missing_ok=True)
        shutil.rmtree(self.corpus, ignore_errors=True)
        self.corpus.mkdir()

    def write_journal(self, journal: dict[str, Any]) -> None:
        """Raises OSError."""
        flush(self.corpus)
        replace_text(self.journal, json.dumps(journal), flushed=True)

    def finish(self) -> None:
        """The corpus appears in `output`, all at once."""
        for file in self.corpus.iterdir():
            flush(file)
        flush(self.corpus)
        self.corpus.rename(self.output)
        flush(self.output.parent)
        self._remove()

    def remove_leftovers(self) -> None:
        """Of a preparation that was killed after `output` had appeared."""
        if self.lock.is_file() and not self.corpus.exists():
            self._remove()

    def check_ours(self) -> None:
        """Raises ConfigError where somebody else has a directory of this name."""
        if self.path.is_dir() and any(self.path.iterdir()) and not self.lock.is_file():
            raise ConfigError("partial_of_another", path=self.path)

    def _remove(self) -> None:
        """What is ours, and last what says so."""
        shutil.rmtree(self.corpus, ignore_errors=True)
        with suppress(OSError):  # a disk that fails, or somebody else has put something there
            for file in (*self.path.glob("journal.*"), self.lock):
                file.unlink(missing_ok=True)
            self.path.rmdir()

    def leave(self) -> str:
        """After a failure: keep what can be continued, else nothing. Returns the sentence about it."""
        if self.journal.is_file():
            return text("left_to_go_on", path=self.path)
        self._remove()
        return text("nothing_left", path=self.output.parent)


def _parts_with_newer_commits(begun: dict[str, Any], request: dict[str, Any]) -> list[str]:
    """Of a mixture that is the same but for them: how they are named as they were. Otherwise none."""
    before, now = begun.get("mixture", []), request.get("mixture", [])

    def but_for_commits(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in part.items() if key != "revision"} for part in parts]

    if begun | {"mixture": now} != request or but_for_commits(before) != but_for_commits(now):
        return []
    return [f"{old['dataset']}@{old['revision']}" for old, new in zip(before, now, strict=True) if old != new]


@contextmanager
def workplace(output: Path, warn: Callable[[str], None]) -> Iterator[Workplace]:
    """Whatever goes wrong inside, what is left behind is either nothing or a beginning that can be continued.

    Whoever interrupts hears from `warn` which of them. Raises DataError, ConfigError.
    """
    place = Workplace(appears_at_once(output))
    try:
        with _locked(place, warn):
            yield place
    except OSError as error:
        left = place.leave()
        if error.errno == errno.ENOSPC:
            raise DataError("disk_full", path=place.output.parent, left=left) from None
        where = error.filename or place.output.parent
        raise DataError("not_written", path=where, error=why_not_written(error), left=left) from None


@contextmanager
def _locked(place: Workplace, warn: Callable[[str], None]) -> Iterator[None]:
    place.check_ours()
    place.path.mkdir(parents=True, exist_ok=True)
    with place.lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("another_prepare", path=place.path) from None
        try:
            with interruptible(lambda: warn(place.leave())):
                yield
        except DataError as error:
            left = place.leave()
            if not place.journal.is_file():
                raise
            raise DataError("and_what_is_left", error=error, left=left) from None
        except Exception:
            place.leave()
            raise
