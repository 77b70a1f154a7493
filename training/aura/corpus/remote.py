"""A corpus behind an URL: the same files as in a directory (aura/corpus/corpus.py).

    s3://bucket/corpora/es/train-00000.bin …, tokenizer.json, meta.json

Training reads from a disk, so a corpus is fetched once into the cache, each file with its checksum, and meta.json last:
without it there is no corpus. The directory's name is the fingerprint: a corpus that was replaced is fetched anew, any
other never again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aura.corpus.corpus import (
    META,
    TOKENIZER,
    Corpus,
    corpus_of,
    entries,
    parse_meta,
    read_corpus,
    sha256_of,
    verify,
)
from aura.corpus.listener import Listener
from aura.durable import flush
from aura.errors import DataError
from aura.storage import cache
from aura.storage.address import Address
from aura.storage.remote import Remote, Unreachable
from aura.texts.console import text

KIND = "corpora"
NAME_LENGTH = 16  # digits of the fingerprint
# What somebody else has written there leads to no other place of this machine.
FILE = re.compile(r"(train|validation(-\d+)?)-\d{5,}\.bin|" + re.escape(TOKENIZER))


class File(NamedTuple):
    sha256: str
    size: int  # bytes; 0: small


def fetch_files(remote: Remote, files: Mapping[str, File], directory: Path, listener: Listener) -> None:
    """What is missing in the directory, or damaged. Raises DataError, Refused, Unreachable, OSError."""
    missing = [name for name, file in files.items() if not _is_right(directory / name, file)]
    size = sum(files[name].size for name in missing)
    cache.check_room(directory, size, remote.address)
    bar = listener.start(text("fetching"), size)
    for name in missing:
        (directory / name).unlink(missing_ok=True)  # a run that reads it keeps what it has
        remote.download(name, directory / name, bar)
        if not _is_right(directory / name, files[name]):
            (directory / name).unlink()
            raise DataError("fetched_file_damaged", address=remote.address / name)
        flush(directory / name)


def read(address: Address) -> Corpus:
    """What the corpus says of itself; nothing else is fetched. Raises DataError, Refused, Unreachable."""
    return corpus_of(_meta(Remote(address)), Path(str(address)))


def fetch(address: Address, listener: Listener) -> Path:
    """The directory of the corpus on this machine. Raises DataError, Refused, Unreachable.

    Where nobody answers, what was fetched before is taken: a run must be able to go on without the internet.
    """
    home = cache.directory_of(KIND, address)
    try:
        remote = Remote(address)
        meta = _meta(remote)
    except Unreachable as error:
        whole = [path for path in home.glob("?" * NAME_LENGTH) if _is_whole(path)]
        if not whole:
            raise
        kept = max(whole, key=lambda path: path.stat().st_mtime)
        listener.say(text("corpus_of_before", error=error, path=kept))
        return kept
    directory = home / str(meta["fingerprint"])[:NAME_LENGTH]
    if not _is_whole(directory):
        with cache.alone_in(home, listener.say):
            if not _is_whole(directory):  # else another process has fetched it
                _fetch(remote, meta, directory, listener)
    return directory


def fetch_to(address: Address, directory: Path, listener: Listener) -> Corpus:
    """Into this directory; the same corpus that is there already is left alone, also where nobody answers. What of it
    is damaged is fetched again: every checksum is compared. Raises DataError, Refused, Unreachable."""
    try:
        remote = Remote(address)
        meta = _meta(remote)
    except Unreachable as error:
        if not _is_whole(directory, verify):
            raise
        listener.say(text("corpus_of_before", error=error, path=directory))
    else:
        directory = directory.resolve()
        with cache.alone_in(directory.parent, listener.say):
            if (directory / META).is_file():
                there = parse_meta((directory / META).read_bytes(), directory / META)["fingerprint"]
                if there != meta["fingerprint"]:
                    raise DataError("output_is_other_corpus", path=directory, fingerprint=there[:12])
            elif directory.exists() and not all(FILE.fullmatch(path.name) for path in directory.iterdir()):
                raise DataError("output_is_no_corpus", path=directory)
            if not _is_whole(directory, verify):
                _fetch(remote, meta, directory, listener)
                return read_corpus(directory)
    listener.say(text("up_to_date", path=directory))
    return read_corpus(directory)


def _fetch(remote: Remote, meta: dict[str, Any], directory: Path, listener: Listener) -> None:
    """Files that came before, whole, are not fetched again."""
    directory.mkdir(exist_ok=True)
    (directory / META).unlink(missing_ok=True)
    fetch_files(remote, _files(meta), directory, listener)
    content = remote.read(META)
    if content is None or parse_meta(content, remote.address / META) != meta:
        raise DataError("corpus_replaced", address=remote.address)
    (directory / META).write_bytes(content)
    flush(directory / META)
    flush(directory)
    listener.say(text("corpus_fetched", address=remote.address, path=directory))


def _meta(remote: Remote) -> dict[str, Any]:
    """meta.json of the corpus that is there. Raises DataError, Refused, Unreachable."""
    content = remote.read(META)
    if content is None:
        raise DataError("no_corpus_there", path=remote.address, file=META)
    meta = parse_meta(content, remote.address / META)
    if strange := [name for name in _files(meta) if not FILE.fullmatch(name)]:
        raise DataError("corpus_file_strange", file=remote.address / META, name=strange[0])
    return meta


def _files(meta: dict[str, Any]) -> dict[str, File]:
    found = {entry["name"]: File(entry["sha256"], entry["bytes"]) for entry in entries(meta)}
    return {TOKENIZER: File(meta["tokenizer_sha256"], 0), **found}


def _is_whole(directory: Path, examine: Callable[[Path], Corpus] = read_corpus) -> bool:
    try:
        examine(directory)
    except DataError:
        return False
    return True


def _is_right(path: Path, file: File) -> bool:
    return path.is_file() and sha256_of(path) == file.sha256
