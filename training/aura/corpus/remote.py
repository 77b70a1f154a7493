"""A corpus in object storage: the same files as in a directory (aura/corpus/corpus.py), meta.json written last.

    s3://bucket/corpora/es/train-00000.bin …, tokenizer.json, meta.json

Without meta.json there is no corpus: what an upload that broke off has left is nothing to anybody. Training reads from
a disk, so a corpus is fetched once into the cache, each file with its checksum, and gets its name there when all are
right. The name is the fingerprint: a corpus that was replaced in the bucket is fetched anew, any other never again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aura.corpus.corpus import (
    INITIAL,
    META,
    TOKENIZER,
    Corpus,
    checksums,
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
from aura.storage.address import Address, appears_at_once
from aura.storage.bucket import Bucket, Unreachable
from aura.texts.console import text

KIND = "corpora"
PREPARED = "prepared"  # what `aura prepare` has made for this address, until it is there
NAME_LENGTH = 16  # digits of the fingerprint
# What somebody else has written in the bucket leads to no other place of this machine.
FILE = re.compile(r"(train|validation(-\d+)?)-\d{5,}\.bin|" + "|".join(map(re.escape, (TOKENIZER, INITIAL))))


def look(bucket: Bucket, address: Address) -> dict[str, Any] | None:
    """meta.json of the corpus at this address; None where there is none. Raises DataError, Refused, Unreachable."""
    content = bucket.read(address / META)
    if content is None:
        return None
    meta = parse_meta(content, address / META)
    if strange := [name for name in checksums(meta) if not FILE.fullmatch(name)]:
        raise DataError("corpus_file_strange", file=address / META, name=strange[0])
    return meta


def read(address: Address) -> Corpus:
    """What the corpus says of itself; nothing else is fetched. Raises DataError, Refused, Unreachable."""
    return corpus_of(_must_be_there(Bucket(address), address), Path(str(address)))


def fetch(address: Address, listener: Listener) -> Path:
    """The directory of the corpus on this machine. Raises DataError, Refused, Unreachable.

    Where nobody answers, what was fetched before is taken: a run must be able to go on without the internet.
    """
    home = cache.directory_of(KIND, address)
    try:
        bucket = Bucket(address)
        meta = _must_be_there(bucket, address)
    except Unreachable as error:
        if not (kept := _newest(home)):
            raise
        listener.say(text("corpus_of_before", error=error, path=kept))
        return kept
    directory: Path = home / meta["fingerprint"][:NAME_LENGTH]
    if _is_whole(directory):
        return directory
    with cache.alone_in(home, listener.say):
        if _is_whole(directory):  # another process has fetched it
            return directory
        _fetch(bucket, address, meta, directory, listener)
    return directory


def fetch_to(address: Address, directory: Path, listener: Listener) -> Corpus:
    """Into this directory; the same corpus that is there already is left alone, also where nobody answers. What of it
    is damaged is fetched again: every checksum is compared. Raises ConfigError, DataError, Refused, Unreachable."""
    try:
        bucket = Bucket(address)
        meta = _must_be_there(bucket, address)
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
            elif directory.exists() and any(directory.iterdir()):
                raise DataError("output_is_no_corpus", path=directory)
            if not _is_whole(directory, verify):
                _fetch(bucket, address, meta, appears_at_once(directory), listener)
                return read_corpus(directory)
    listener.say(text("up_to_date", path=directory))
    return read_corpus(directory)


def _fetch(
    bucket: Bucket, address: Address, meta: dict[str, Any], directory: Path, listener: Listener
) -> None:
    """Files that came before, whole, are not fetched again."""
    partial = directory.with_name(f"{directory.name}.fetched")
    if directory.is_dir() and not partial.exists():  # somebody has damaged it; what is right of it is kept
        directory.rename(partial)
    partial.mkdir(exist_ok=True)
    (partial / META).unlink(missing_ok=True)
    wanted, sizes = checksums(meta), _sizes(meta)
    missing = [name for name in wanted if not _is_right(partial / name, wanted[name])]
    cache.check_room(partial, sum(sizes[name] for name in missing), address)
    bar = listener.start(text("fetching"), sum(sizes[name] for name in missing))
    for name in missing:
        (partial / name).unlink(missing_ok=True)  # a run that reads it keeps what it has
        bucket.download(address / name, partial / name, bar)
        if not _is_right(partial / name, wanted[name]):
            (partial / name).unlink()
            raise DataError("corpus_object_damaged", address=address / name)
        flush(partial / name)
    content = bucket.read(address / META)
    if content is None or parse_meta(content, address / META) != meta:
        raise DataError("corpus_replaced", address=address)
    (partial / META).write_bytes(content)
    flush(partial / META)
    flush(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    flush(directory.parent)
    listener.say(text("corpus_fetched", address=address, path=directory))


def publish(corpus: Corpus, bucket: Bucket, address: Address, listener: Listener) -> None:
    """All files of a corpus, then meta.json. What went before is not sent again; a corpus of other content that is
    there already is left alone: DataError. Raises Refused, Unreachable too."""
    if there := look(bucket, address):
        if there["fingerprint"] != corpus.fingerprint:
            fingerprint = there["fingerprint"][:12]
            raise DataError("output_is_other_corpus", path=address, fingerprint=fingerprint)
        return
    meta = parse_meta((corpus.path / META).read_bytes(), corpus.path / META)
    wanted = checksums(meta)
    sizes = {name: (corpus.path / name).stat().st_size for name in wanted}
    missing = [name for name in wanted if not bucket.holds(address / name, sizes[name], wanted[name])]
    bar = listener.start(text("sending"), sum(sizes[name] for name in missing))
    for name in missing:
        if not bucket.upload(corpus.path / name, address / name, wanted[name], bar):
            raise DataError("corpus_file_damaged", file=corpus.path / name)
    bucket.write(address / META, (corpus.path / META).read_bytes())


def prepared(address: Address) -> Path:
    """Where `aura prepare` works for an address, on this machine."""
    return cache.directory_of(KIND, address) / PREPARED


def keep(corpus: Corpus, address: Address) -> Path:
    """What was prepared here and published is what `fetch` would fetch."""
    directory = cache.directory_of(KIND, address) / corpus.fingerprint[:NAME_LENGTH]
    if directory.exists():
        shutil.rmtree(corpus.path)
    else:
        corpus.path.rename(directory)
    return directory


def _must_be_there(bucket: Bucket, address: Address) -> dict[str, Any]:
    meta = look(bucket, address)
    if meta is None:
        raise DataError("no_corpus", path=address, file=META)
    return meta


def _newest(home: Path) -> Path | None:
    whole = [path for path in home.glob("?" * NAME_LENGTH) if _is_whole(path)]
    return max(whole, key=lambda path: path.stat().st_mtime, default=None)


def _is_whole(directory: Path, examine: Callable[[Path], Corpus] = read_corpus) -> bool:
    try:
        examine(directory)
    except DataError:
        return False
    return True


def _is_right(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def _sizes(meta: dict[str, Any]) -> dict[str, int]:
    """Of the tokenizer, meta.json says none: it is small."""
    return {TOKENIZER: 0} | {entry["name"]: entry["bytes"] for entry in entries(meta)}
