"""Text to token ids, in several processes, with every word of a language encoded once.

Most of the time of a byte-level BPE goes into cutting text into words, again and again the same ones. GPT-2's
pattern never lets a token reach across a single space into the word before it, so a text can be cut at its spaces
first, which costs nothing, and what the library made of a word can be remembered. `Words` does that and gives exactly
the library's ids; tokenizers of another build go to the library as they are (`Encoder`).

Processes, not the library's threads: measured on two cores, the same work takes it 1.4 times the CPU time in threads.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aura.corpus.corpus import TOKENIZER
from aura.corpus.round_trip import New, RoundTrip
from aura.corpus.tokenizer import one_sentence
from aura.errors import AuraError, DataError

REMEMBERED_WORDS = 250_000  # about 50 MB
LONGEST_REMEMBERED = 64  # characters
# A space at which a text may be cut: after a letter, or before one. In a longer run of white space, where neither
# is so, GPT-2's pattern looks ahead.
SPACE = re.compile(r"(?<!\s) | (?=\S)")
WHITE = re.compile(r"\s")
WORDS_AT_ONCE = 256

Ids = NDArray[np.unsignedinteger[Any]]
Arguments = tuple[str, int, str, str, set[str]]  # Encoder's


@dataclass(frozen=True)
class Batch:
    """Documents as they were read, and what to write down once they are on the disk."""

    texts: list[str]
    position: Any  # of the source, behind these documents
    skipped: dict[str, int]  # up to here, per kind
    parts: list[int]  # per document: its part of a mixture, otherwise 0


@dataclass(frozen=True)
class Encoded:
    """The documents of a batch, one after another, each with the end-of-text token behind it."""

    ids: Ids  # of all documents
    lengths: NDArray[np.int64]  # tokens per document
    sizes: NDArray[np.int64]  # UTF-8 bytes per document
    hashes: NDArray[np.uint64]  # per document; see document_hash
    new: tuple[New, ...] = ()  # characters that were not tried before; of each its first document


def document_hash(text: bytes) -> int:
    """64 bits, uniform over documents."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class Encoder:
    """tokenizer.json and the end-of-text id -> what encodes documents. Token ids are '<u2' or '<u4'. `name`: of a
    tokenizer that was not trained here, and may lose characters other than those that were `tried`."""

    def __init__(
        self, tokenizer_json: str, end_of_text: int, dtype: str, name: str = "", tried: Iterable[str] = ()
    ) -> None:
        self.name = name or TOKENIZER
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
        self.dtype = np.dtype(dtype)
        self.end = np.array([end_of_text], self.dtype).tobytes()
        self.words = Words(self) if words_are_independent(tokenizer_json) else None
        self.round_trip = RoundTrip(name, tokenizer_json, tried) if name else None

    def library(self, texts: list[str]) -> list[bytes]:
        with one_sentence(self.name, error=DataError):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype).tobytes() for encoding in encodings]

    def __call__(self, texts: list[str]) -> Encoded:
        new = self.round_trip.try_new(texts) if self.round_trip else []
        ids = self.words.encode(texts) if self.words else self.library(texts)
        data = [text.encode() for text in texts]
        width = self.dtype.itemsize
        return Encoded(
            ids=np.frombuffer(b"".join(part + self.end for part in ids), self.dtype),
            lengths=np.array([len(part) // width + 1 for part in ids], np.int64),
            sizes=np.array([len(part) for part in data], np.int64),
            hashes=np.array([document_hash(part) for part in data], np.uint64),
            new=tuple(new),
        )


def words_are_independent(tokenizer_json: str) -> bool:
    """Is this a byte-level BPE with GPT-2's pattern, in which nothing reaches across a space?"""
    parts = json.loads(tokenizer_json)
    before = parts["pre_tokenizer"] or {}
    return bool(
        parts["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before["add_prefix_space"]
        and parts["model"]["type"] == "BPE"
        and not parts["model"].get("dropout")
        and "\u010a" in parts["model"]["vocab"]  # the byte of a line feed
        and all(token["special"] for token in parts["added_tokens"])
    )


class Words:
    """The ids of words, each asked of the library once.

    `known` maps a word without the space before it to the bytes of the ids of " word"; `first` holds words that
    begin a text, without a space.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.known: dict[str, bytes] = {}
        self.first: dict[str, bytes] = {}
        self.dtype = encoder.dtype
        (self.line_feed,) = np.frombuffer(encoder.library(["\n"])[0], self.dtype)  # a byte, so one token

    def encode(self, texts: list[str]) -> list[bytes]:
        for memory in (self.known, self.first):
            if len(memory) > REMEMBERED_WORDS:
                memory.clear()
        split = [text.split(" ") for text in texts]
        # Words that begin with white space are never remembered, so none is overlooked here.
        odd = {word for word in self._missing(split) if not word or word[0].isspace()}
        if odd:
            split = [
                words if odd.isdisjoint(words) else SPACE.split(text)
                for text, words in zip(texts, split, strict=True)
            ]
        missing = list(self._missing(split))
        self._learn(missing)
        begins = list({words[0] for words in split} - self.first.keys())
        self.first.update(zip(begins, self.encoder.library(begins), strict=True))
        known = self.known.__getitem__
        ids = [self.first[words[0]] + b"".join(map(known, islice(words, 1, None))) for words in split]
        for word in missing:
            if not word or word[0].isspace() or len(word) > LONGEST_REMEMBERED:
                del self.known[word]
        for word in begins:
            if len(word) > LONGEST_REMEMBERED:
                del self.first[word]
        return ids

    def _learn(self, words: list[str]) -> None:
        """Many words in one text, each on a line: asking the library for each word costs five times as much."""
        plain = [word for word in words if word and not WHITE.search(word)]
        for begin in range(0, len(plain), WORDS_AT_ONCE):
            some = plain[begin : begin + WORDS_AT_ONCE]
            ids = np.frombuffer(self.encoder.library(["\n".join(f" {word}" for word in some)])[0], self.dtype)
            parts = np.split(ids, np.flatnonzero(ids == self.line_feed))
            self.known[some[0]] = parts[0].tobytes()
            self.known.update(
                (word, part[1:].tobytes()) for word, part in zip(some[1:], parts[1:], strict=True)
            )
        others = [word for word in words if word not in self.known]
        self.known.update(zip(others, self.encoder.library([f" {word}" for word in others]), strict=True))

    def _missing(self, split: list[list[str]]) -> set[str]:
        return set().union(*(islice(words, 1, None) for words in split)) - self.known.keys()


_encoder: Encoder  # of a worker process


def _start_worker(arguments: Arguments) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the process that writes
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _encoder = Encoder(*arguments)


def _end_with_the_parent() -> None:
    """Nobody tells a worker that its parent was killed."""
    parent = multiprocessing.parent_process()
    if parent:
        wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> Encoded:
    return _encoder(texts)


def _start_silent_tracker() -> None:
    """multiprocessing's own process, which removes its semaphores behind one that an interrupt has ended at once
    (aura/corpus/interrupt.py), and would print a warning about them."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        resource_tracker.ensure_running()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def encode_all(
    batches: Iterator[Batch], arguments: Arguments, workers: int
) -> Generator[tuple[Batch, Encoded], None, None]:
    """Every batch with its ids, in order; one worker means this process.

    No more than two batches per worker are in memory. Raises DataError when a worker dies.
    """
    if workers == 1:
        encoder = Encoder(*arguments)
        for one in batches:
            yield one, encoder(one.texts)
        return
    if not os.access(".", os.X_OK):  # somebody's home, behind sudo: a worker would end in there
        os.chdir("/")
    _start_silent_tracker()
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(arguments,)
    )
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    failure: AuraError | None = None
    batch: Batch | None
    try:
        while not failure:
            try:
                batch = next(batches, None)
            except AuraError as error:
                # What was read before it comes out first, as with one worker.
                failure, batch = error, None
            if batch:
                waiting.append((batch, pool.submit(_encode_in_worker, batch.texts)))
            while waiting and (len(waiting) > 2 * workers or not batch):
                oldest, future = waiting.popleft()
                yield oldest, future.result()
            if not batch:
                break
        if failure:
            raise failure
    except BrokenProcessPool:
        raise DataError("worker_died") from None
    finally:
        pool.shutdown(cancel_futures=True)
