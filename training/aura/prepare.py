"""`aura prepare`: text files in, a corpus out (see aura/corpus.py).

What counts as a document: text files hold running text, so a document is a run of whole paragraphs (blocks between
blank lines) of at least DOCUMENT_CHARS characters, or the rest of a file. Documents, not lines, are divided between
training and validation, so that the validation loss does not profit from the other half of a sentence. A document
goes to validation when its hash says so: the division does not depend on the names of the files, and a document
that occurs twice is never on both sides.

The input is read three times, a megabyte at a time (scan, train the tokenizer, encode); memory does not grow with it.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from aura import corpus as corpora
from aura.errors import ConfigError, DataError, Parser

DOCUMENT_CHARS = 4096  # a document ends with the first paragraph that reaches this length
LONGEST_DOCUMENT = 65536  # characters; text without blank lines is cut here, at a space
CHUNK = 1 << 20  # bytes read at once
BATCH = 256  # documents encoded at once
SHARD_TOKENS = 100_000_000  # a file of token ids is closed when it reaches this length
TOKENIZER_SAMPLE = 500_000_000  # characters of training text that the tokenizer learns from, at most
SMALLEST_VOCABULARY = 257  # 256 bytes and <|endoftext|>
BLANK_LINES = re.compile(r"\n[ \t]*(?:\n\s*)+")

Advance = Callable[[int], None]  # called with the number of bytes read


@dataclass(frozen=True)
class Scan:
    """What the first pass over the text finds out."""

    digest: str  # SHA-256 of the content of all files, in order
    documents: int
    smallest_hash: int


def prepare(
    inputs: list[Path], output: Path, vocab_size: int, validation_fraction: float = 0.01
) -> corpora.Corpus:
    """Build the corpus in `output`, or return the one that is there when it was made from the same text.

    The result depends only on the text and the settings: two runs give the same bytes. It appears in `output` all
    at once; whatever goes wrong, nothing is left behind. Raises DataError, ConfigError.
    """
    if not SMALLEST_VOCABULARY <= vocab_size <= corpora.LARGEST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size {vocab_size} must lie between {SMALLEST_VOCABULARY} and {corpora.LARGEST_VOCABULARY} "
            "(token ids are stored in 16 bits)."
        )
    if not 0 < validation_fraction < 1:
        raise ConfigError(f"--validation-fraction {validation_fraction} must lie between 0 and 1.")
    files = find_files(inputs)
    size = sum(file.stat().st_size for file in files)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description:24}"), *columns, console=Console(stderr=True)) as progress:

        def start(description: str) -> Advance:
            task = progress.add_task(description, total=size)
            return lambda count: progress.advance(task, count)

        scan = scan_files(files, start("Reading"))
        settings = {"vocab_size": vocab_size, "validation_fraction": validation_fraction}
        source = {"sha256": scan.digest, "bytes": size, "documents": scan.documents, **settings}
        if output.exists() and (existing := _existing(output, source)):
            return existing
        # At least one document is for validation, however few there are.
        cut = max(int(validation_fraction * 2**64), scan.smallest_hash)
        with _directory_that_appears_at_once(output) as temporary:
            tokenizer = train_tokenizer(files, vocab_size, cut, start("Training the tokenizer"))
            meta = {"source": source, **encode(files, tokenizer, temporary, cut, start("Encoding"))}
            meta["fingerprint"] = corpora.fingerprint_of(meta)
            _write(temporary / corpora.META, json.dumps(meta, indent=1))
    return corpora.read_corpus(output)


def find_files(inputs: list[Path]) -> list[Path]:
    """The files themselves, and every *.txt below the directories, sorted by path."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            below = sorted(file for file in path.rglob("*.txt") if file.is_file())
            if not below:
                raise DataError(f"There is no .txt file in {path}.")
            files += below
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"{path} does not exist.")
    files = list(dict.fromkeys(files))
    for file in files:
        if file.stat().st_size == 0:
            if len(files) == 1:
                raise DataError(f"{file} is empty.")
            print(f"Note: {file} is empty.", flush=True)
    return files


def read_documents(
    file: Path, advance: Advance, digest: Callable[[bytes], None] | None = None
) -> Iterator[str]:
    """The documents of one UTF-8 file; see the head of this module."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    text, ended = "", False
    with file.open("rb") as stream:
        while not ended:
            chunk = stream.read(CHUNK)
            ended = not chunk
            if digest:
                digest(chunk)
            try:
                text += decoder.decode(chunk, final=ended)
            except UnicodeDecodeError:
                raise DataError(_where_utf8_ends(file)) from None
            begin = 0
            while (cut := _next_cut(text, begin, ended)) is not None:
                document = text[begin : cut[0]].strip("\ufeff \t\n")
                begin = cut[1]
                if document:
                    yield document
            text = text[begin:]
            advance(len(chunk))


def _next_cut(text: str, begin: int, ended: bool) -> tuple[int, int] | None:
    """Where the document that begins at `begin` ends and the next begins; None when more text is needed."""
    blank = BLANK_LINES.search(text, begin + DOCUMENT_CHARS, begin + LONGEST_DOCUMENT)
    # Blank lines that touch the end of what was read may go on in the next chunk.
    if blank and blank.end() < min(len(text), begin + LONGEST_DOCUMENT):
        return blank.start(), blank.end()
    if len(text) - begin > LONGEST_DOCUMENT:
        space = text.rfind(" ", begin + DOCUMENT_CHARS, begin + LONGEST_DOCUMENT)
        end = space if space > 0 else begin + LONGEST_DOCUMENT
        return end, end
    if ended and begin < len(text):
        return len(text), len(text)
    return None


def _where_utf8_ends(file: Path) -> str:
    """The sentence about the first byte of `file` that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, lines = 0, 0
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(CHUNK)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                bad = error.start - waiting  # within this chunk
                line = lines + chunk[: max(bad, 0)].count(b"\n") + 1
                byte = error.object[error.start]
                return (
                    f"{file} is not UTF-8: byte {offset + bad} (line {line}) is 0x{byte:02x}. "
                    f"If it is Latin-1, convert it: iconv -f latin1 -t utf8 {file.name} > {file.stem}-utf8.txt"
                )
            offset += len(chunk)
            lines += chunk.count(b"\n")


def scan_files(files: list[Path], advance: Advance) -> Scan:
    """Read everything once: is it UTF-8, is there enough of it, and what is its digest?"""
    digest = hashlib.sha256()
    hashes: set[int] = set()  # no more than two are kept
    documents, smallest = 0, 2**64
    for file in files:
        digest.update(b"%d:" % file.stat().st_size)
        for document in read_documents(file, advance, digest.update):
            documents += 1
            value = document_hash(document)
            smallest = min(smallest, value)
            if len(hashes) < 2:
                hashes.add(value)
    if documents == 0:
        raise DataError(f"There is no text in {', '.join(map(str, files))}: only spaces and empty lines.")
    if len(hashes) < 2:
        raise DataError(
            f"There is too little text in {', '.join(map(str, files))}: training and validation need at least two "
            f"different documents, that is, more than {DOCUMENT_CHARS} characters."
        )
    return Scan(digest.hexdigest(), documents, smallest)


def document_hash(document: str) -> int:
    """64 bits, uniform over documents."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "big")


def train_tokenizer(files: list[Path], vocab_size: int, cut: int, advance: Advance) -> Tokenizer:
    """A byte-level BPE as GPT-2's: any text can be encoded, and decoding gives back the same bytes."""

    def training_text() -> Iterator[str]:
        read = 0
        for file in files:
            for document in read_documents(file, advance):
                if document_hash(document) > cut and read < TOKENIZER_SAMPLE:
                    read += len(document)
                    yield document

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[corpora.END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def encode(
    files: list[Path], tokenizer: Tokenizer, directory: Path, cut: int, advance: Advance
) -> dict[str, Any]:
    """Write the tokenizer and the token ids of both splits; returns what meta.json says about them."""
    tokenizer_json = tokenizer.to_str(pretty=False)
    _write(directory / corpora.TOKENIZER, tokenizer_json)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
    end_of_text = tokenizer.token_to_id(corpora.END_OF_TEXT)
    vocab_size = tokenizer.get_vocab_size()
    counts = np.zeros(vocab_size, dtype=np.int64)  # of the training tokens
    writers = {split: ShardWriter(directory, split) for split in ("train", "validation")}
    documents = (document for file in files for document in read_documents(file, advance))
    while batch := list(islice(documents, BATCH)):
        for document, encoding in zip(batch, tokenizer.encode_batch_fast(batch), strict=True):
            ids = np.array([*encoding.ids, end_of_text], dtype="<u2")
            split = "train" if document_hash(document) > cut else "validation"
            writers[split].add(ids)
            if split == "train":
                counts += np.bincount(ids, minlength=vocab_size)
    entries = {split: writer.close() for split, writer in writers.items()}
    return {
        "format": corpora.FORMAT,
        "vocab_size": vocab_size,
        "tokenizer_sha256": hashlib.sha256(tokenizer_json.encode()).hexdigest(),
        "end_of_text_id": end_of_text,
        "tokens": {split: sum(entry["tokens"] for entry in entries[split]) for split in entries},
        "documents": {split: writer.documents for split, writer in writers.items()},
        "unigram_entropy": unigram_entropy(counts),
        "files": entries,
    }


class ShardWriter:
    """Writes one split as train-00000.bin, train-00001.bin …"""

    def __init__(self, directory: Path, split: str) -> None:
        self.directory, self.split = directory, split
        self.entries: list[dict[str, Any]] = []
        self.documents = 0
        self._open()

    def _open(self) -> None:
        self.name = f"{self.split}-{len(self.entries):05d}.bin"
        self.file = (self.directory / self.name).open("wb")
        self.digest, self.tokens = hashlib.sha256(), 0

    def add(self, ids: np.ndarray[Any, Any]) -> None:
        """One document; token ids of type '<u2'."""
        if self.tokens >= SHARD_TOKENS:
            self._finish()
            self._open()
        data = ids.tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.tokens += len(ids)
        self.documents += 1

    def _finish(self) -> None:
        _flush_to_disk(self.file)
        self.file.close()
        size = self.tokens * corpora.BYTES_PER_TOKEN
        entry = {"name": self.name, "tokens": self.tokens, "bytes": size, "sha256": self.digest.hexdigest()}
        self.entries.append(entry)

    def close(self) -> list[dict[str, Any]]:
        self._finish()
        return self.entries


def unigram_entropy(counts: np.ndarray[Any, Any]) -> float:
    """-sum p ln p [nats per token]."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _existing(output: Path, source: dict[str, Any]) -> corpora.Corpus | None:
    """The corpus in `output` when it comes from the same text; None for an empty directory."""
    if output.is_dir() and not any(output.iterdir()):
        return None
    if not (output / corpora.META).is_file():
        raise DataError(f"{output} exists and is not a corpus: choose another --output.")
    existing = corpora.verify(output)
    if existing.source != source:
        raise DataError(
            f"{output} holds a corpus from other text or settings (fingerprint {existing.fingerprint[:12]}): "
            "choose another --output, or remove it first."
        )
    return existing


@contextmanager
def _directory_that_appears_at_once(output: Path) -> Iterator[Path]:
    """A temporary directory next to `output` that becomes `output` at the end, or vanishes."""
    output = output.absolute()
    temporary = output.with_name(f"{output.name}.tmp-{os.getpid()}")
    old_handler = signal.signal(signal.SIGTERM, _exit_in_order)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        temporary.mkdir()
        yield temporary
        _flush_directory(temporary)
        temporary.rename(output)
        _flush_directory(output.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"The disk that holds {output.parent} is full; nothing was left in it. A corpus needs about as much "
                "space as its text."
            ) from None
        raise DataError(
            f"{error.filename or output}: {error.strerror}; nothing was left in {output.parent}."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        signal.signal(signal.SIGTERM, old_handler)


def _remove_abandoned(output: Path) -> None:
    """What a killed `aura prepare` left: its directory carries the id of a process that is gone."""
    for path in output.parent.iterdir():
        name, _, process = path.name.rpartition(".tmp-")
        if name == output.name and process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(path)


def _exit_in_order(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through the finally above


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _flush_to_disk(file)


def _flush_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura prepare",
        description="Turn text into a corpus: train a byte-level BPE on it, encode it, divide it into training and "
        "validation. The same text and settings give the same fingerprint; a corpus that is up to date is left alone.",
    )
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="UTF-8 text files, or directories of .txt",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of the corpus")
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="token ids, at most that of the preset"
    )
    parser.add_argument(
        "--validation-fraction", type=float, default=0.01, metavar="PART", help="part of the documents (0.01)"
    )
    arguments = parser.parse_args(argv)
    existed = (arguments.output / corpora.META).exists()
    corpus = prepare(arguments.input, arguments.output, arguments.vocab_size, arguments.validation_fraction)
    if existed:
        print(f"{arguments.output} is up to date.")
    elif corpus.vocab_size < arguments.vocab_size:
        print(f"Note: the text gives no more than {corpus.vocab_size} token ids.")
    ratio = corpus.source["bytes"] / sum(corpus.tokens.values())
    print(
        f"{corpus.tokens['train']:,} training and {corpus.tokens['validation']:,} validation tokens "
        f"({ratio:.2f} bytes per token), vocabulary {corpus.vocab_size}.\n"
        f"Unigram entropy {corpus.unigram_entropy:.4f} nats per token; without any knowledge ln({corpus.vocab_size}) "
        f"= {math.log(corpus.vocab_size):.4f}.\n"
        f"Fingerprint {corpus.fingerprint}"
    )
    return 0
