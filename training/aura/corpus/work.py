"""The work of `aura prepare`: documents in, shards out, and a journal of how far it is."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from aura.corpus import corpus as corpora
from aura.corpus import round_trip, shards, tokenizer
from aura.corpus.duplicates import Seen
from aura.corpus.encode import Batch, Encoded, document_hash, encode_all
from aura.corpus.listener import Bar, Listener
from aura.corpus.running_text import DOCUMENT_CHARS
from aura.corpus.shards import SPLITS, ShardWriter, Workplace
from aura.corpus.sources import Problems, Source
from aura.corpus.tokenizer import SMALLEST_VOCABULARY, Prepared
from aura.durable import flush
from aura.errors import ConfigError, DataError
from aura.texts import console

BATCH_CHARS = 1_000_000  # characters encoded at once
TOKENIZER_SAMPLE = 100_000_000  # characters of training text that the tokenizer learns from, at most
CHARS_PER_TOKEN = 6  # more than a Spanish text has


@dataclass(frozen=True)
class Settings:
    vocab_size: int | None  # of the tokenizer that is trained
    validation_fraction: float = 0.01
    tokenizer: str | None = None  # an existing one instead
    max_tokens: int | None = None
    max_errors: int = 0
    accept_lossy: bool = False  # what `tokenizer` loses of the text
    workers: int = 1

    def check(self) -> None:
        """Raises ConfigError."""
        if (self.vocab_size is None) == (self.tokenizer is None) or self.tokenizer == "":
            raise ConfigError("vocabulary_or_tokenizer")
        size, smallest, largest = self.vocab_size, SMALLEST_VOCABULARY, corpora.LARGEST_VOCABULARY
        if size is not None and not smallest <= size <= largest:
            raise ConfigError("vocab_size_wrong", value=size, smallest=smallest, largest=largest)
        if not 0 < self.validation_fraction < 1:
            raise ConfigError("validation_fraction_wrong", value=self.validation_fraction)
        bounds = (("dataset-max-tokens", self.max_tokens, 1), ("workers", self.workers, 1))
        for name, value, least in (*bounds, ("max-errors", self.max_errors, 0)):
            if value is not None and value < least:
                raise ConfigError("at_least", name=name, value=value, least=least)


class Work:
    """One preparation, between a batch that is written and the next. All that counts is in its journal."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        place: Workplace,
        request: dict[str, Any],
        listener: Listener,
        cut: int,
    ) -> None:
        self.source, self.settings, self.place, self.request = source, settings, place, request
        self.listener, self.cut = listener, cut  # documents with a hash above `cut` are for training
        self.position: Any = None
        self.problems = Problems(settings.max_errors, listener.say)
        self.skipped = dict(self.problems.counts)
        self.text_bytes, self.smallest, self.largest = 0, 2**64, 0
        self.part_tokens = np.zeros(max(len(source.parts), 1), np.int64)
        self.tried: set[str] = set()  # characters that the tokenizer was checked with
        self.losses = 0  # that were said
        self.duplicates = 0  # documents that were left out

    def check_tokenizer(self, loaded: Prepared) -> None:
        """What it makes of a sample of this text. Raises ConfigError, DataError."""
        assert self.settings.tokenizer
        most = (self.settings.max_tokens or TOKENIZER_SAMPLE) * CHARS_PER_TOKEN
        bar = self.listener.start(console.text("checking_the_tokenizer"), None)
        problems = Problems(self.settings.max_errors, lambda sentence: None)  # they are reported later
        documents = self.source.documents(None, problems, bar)
        accept, say = self.settings.accept_lossy, self.listener.say
        self.tried = round_trip.check(self.settings.tokenizer, loaded, documents, most, accept, say)

    def begin(self, loaded: Prepared | None) -> None:
        self.tokenizer = loaded or self._train_tokenizer()
        file = self.place.corpus / corpora.TOKENIZER
        file.write_text(self.tokenizer.json, encoding="utf-8")
        flush(file)
        self.counts = np.zeros(self.tokenizer.vocab_size, np.int64)  # of the training tokens
        self.seen = Seen(self.place.hashes)
        self._open_shards({})

    def go_on(self, journal: dict[str, Any]) -> None:
        """Raises ConfigError."""
        self.tokenizer = Prepared(**journal["tokenizer"])
        self.position, self.skipped = journal["position"], journal["skipped"]
        self.counts = np.array(journal["counts"])
        self.problems.counts |= self.skipped
        self.text_bytes, self.smallest, self.largest = journal["text"]
        self.part_tokens += journal.get("part_tokens", 0)  # an earlier release did not write it down
        self.tried = set(journal.get("tried", []))  # an earlier release did not write it down
        # An earlier release left no duplicates out: it may have written some before this.
        self.seen = Seen(self.place.hashes, journal.get("hashes", 0))
        self.duplicates = journal.get("duplicates", 0)
        self._open_shards(journal["shards"])

    def _open_shards(self, states: dict[str, Any]) -> None:
        """Validation text of a mixture lies by part, so that its loss can be told by part."""
        self.width = corpora.bytes_per_token(self.tokenizer.vocab_size)

        def writer(name: str) -> ShardWriter:
            return ShardWriter(self.place.corpus, name, self.width, states.get(name))

        of_parts = [f"validation-{number}" for number in range(len(self.source.parts))]
        self.splits = {
            "train": [writer("train")],
            "validation": [writer(name) for name in of_parts or ["validation"]],
        }

    def _writers(self) -> list[ShardWriter]:
        return [writer for writers in self.splits.values() for writer in writers]

    def _documents(self) -> dict[str, int]:
        return {split: sum(one.documents for one in writers) for split, writers in self.splits.items()}

    def _journal(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "cut": self.cut,
            "tokenizer": asdict(self.tokenizer),
            "position": self.position,
            "skipped": self.skipped,
            "counts": self.counts.tolist(),
            "text": [self.text_bytes, self.smallest, self.largest],
            "part_tokens": self.part_tokens.tolist(),
            "tried": sorted(self.tried),
            "hashes": len(self.seen.hashes),
            "duplicates": self.duplicates,
            "shards": {writer.name: writer.state() for writer in self._writers()},
        }

    def _train_tokenizer(self) -> Prepared:
        most = TOKENIZER_SAMPLE
        if self.settings.max_tokens:
            most = min(most, self.settings.max_tokens * CHARS_PER_TOKEN)
        bar = self.listener.start(console.text("training_the_tokenizer"), self.source.size)

        problems = Problems(self.settings.max_errors, lambda sentence: None)  # they are reported later
        documents = self.source.documents(None, problems, bar)  # the library would not hear signals meanwhile

        def training_text() -> Iterator[str]:
            read = 0
            for text in documents:
                if document_hash(text.encode()) > self.cut:
                    read += len(text)
                    if self.source.size and self.source.size > most:
                        bar.expect(min(1.0, read / most))
                    yield text
                    if read >= most:
                        return

        assert self.settings.vocab_size
        return tokenizer.train(training_text(), self.settings.vocab_size)

    def _encoded(self, bar: Bar) -> Generator[tuple[Batch, Encoded], None, None]:
        """What is left, in the order in which it is written."""
        batches = read_batches(self.source, self.position, self.problems, bar)
        name = self.settings.tokenizer or ""
        arguments = (self.tokenizer.json, self.tokenizer.end_of_text_id, f"<u{self.width}", name, self.tried)
        return encode_all(batches, arguments, self.settings.workers)

    def _judge(self, new: Iterable[round_trip.New]) -> None:
        """Of documents that are taken. Raises DataError where characters are lost that occur for the first time."""
        lost: dict[round_trip.Change, None] = {}
        for _, piece, change in new:
            if change and piece not in self.tried:
                lost[change] = None
            self.tried.add(piece)
        if lost and self.losses < round_trip.EXAMPLES:
            examples = round_trip.listed([*lost][: round_trip.EXAMPLES])
            loss = console.text("text_is_lost_later", name=self.settings.tokenizer, examples=examples)
            if not self.settings.accept_lossy:
                raise DataError("tokenizer_loses_text", loss=loss)
            self.listener.say(loss)
            self.losses += len(lost)

    def run(self) -> None:
        """Encode and write what is left, with a journal now and then."""
        bar = self.listener.start(console.text("encoding"), self.source.size)
        limit, written, before = self.settings.max_tokens, time.monotonic(), self.tokens()
        with closing(self._encoded(bar)) as encoded:
            for batch, part in encoded:
                finished = self._write(part, np.array(batch.parts), limit - self.tokens() if limit else None)
                self.position, self.skipped = batch.position, batch.skipped
                if limit:
                    bar.expect(max(self.tokens() - before, 1) / (limit - before))
                    if self.tokens() >= limit:
                        break
                if finished or time.monotonic() - written >= shards.COMMIT_SECONDS:
                    for writer in self._writers():
                        writer.flush()
                    self.seen.flush()
                    self.place.write_journal(self._journal())
                    written = time.monotonic()
            else:
                self.skipped = dict(self.problems.counts)  # also behind the last document
        if not any(self._documents().values()):
            raise DataError("no_text", name=self.source.name)
        if self.smallest == self.largest:
            if limit and self.tokens() >= limit:
                raise DataError("too_little_text_for", name=self.source.name, tokens=limit)
            raise DataError("too_little_text", name=self.source.name, characters=DOCUMENT_CHARS)

    def _write(self, part: Encoded, parts: np.ndarray[Any, Any], most: int | None) -> bool:
        """Divide the documents that are new between the splits, up to the one that reaches `most` tokens."""
        new = self.seen.add(part.hashes)
        count = len(new)
        if most is not None:
            count = min(count, int(np.searchsorted(np.cumsum(part.lengths * new), most)) + 1)
        new = new[:count]
        self.duplicates += int((~new).sum())
        if not new.any():
            return False
        ids = part.ids[: int(part.lengths[:count].sum())][np.repeat(new, part.lengths[:count])]
        lengths, sizes, hashes, parts = (
            column[:count][new] for column in (part.lengths, part.sizes, part.hashes, parts)
        )
        self.text_bytes += int(sizes.sum())
        np.add.at(self.part_tokens, parts, lengths)
        self._judge(one for one in part.new if one[0] < count)
        self.smallest = min(self.smallest, int(hashes.min()))
        self.largest = max(self.largest, int(hashes.max()))
        training = hashes > np.uint64(min(self.cut, 2**64 - 1))
        of_training = np.repeat(training, lengths)
        self.counts += np.bincount(ids[of_training], minlength=len(self.counts))
        finished = [self.splits["train"][0].add(ids[of_training], lengths[training], sizes[training])]
        for number, writer in enumerate(self.splits["validation"]):
            wanted = ~training & (parts == number)
            finished.append(writer.add(ids[np.repeat(wanted, lengths)], lengths[wanted], sizes[wanted]))
        return any(finished)

    def tokens(self) -> int:
        return sum(writer.total() for writer in self._writers())

    def one_split_is_empty(self) -> bool:
        return not all(self._documents().values())

    def meta(self) -> dict[str, Any]:
        unknown = tokenizer.unknown_id(self.tokenizer)
        if unknown is not None and self.counts[unknown]:
            self.listener.say(console.text("unknown_pieces", count=self.counts[unknown], token=unknown))
        documents, entries = self._documents(), self._entries()
        provenance = self.source.provenance()
        for part, tokens in zip(provenance.get("parts", []), self.part_tokens.tolist(), strict=False):
            part["tokens"] = tokens
        return {
            "source": {
                **self.request,
                **provenance,
                # No word of it where there are none: such a corpus has the fingerprint that it had before.
                **({"duplicates": self.duplicates} if self.duplicates else {}),
                "documents": sum(documents.values()),
            },
            "format": corpora.FORMAT,
            "vocab_size": self.tokenizer.vocab_size,
            "bytes_per_token": self.width,
            "tokenizer_sha256": hashlib.sha256(self.tokenizer.json.encode()).hexdigest(),
            "end_of_text": self.tokenizer.end_of_text,
            "end_of_text_id": self.tokenizer.end_of_text_id,
            "pad": self.tokenizer.pad,
            "pad_id": self.tokenizer.pad_id,
            "tokens": {split: sum(entry["tokens"] for entry in entries[split]) for split in SPLITS},
            "documents": documents,
            "skipped": self.skipped,
            "text_bytes": self.text_bytes,
            "unigram_entropy": unigram_entropy(self.counts),
            "files": entries,
        }

    def _entries(self) -> dict[str, list[dict[str, Any]]]:
        """Of the files of each split."""
        entries = {split: [one.close() for one in writers] for split, writers in self.splits.items()}
        for part, files in zip(self.source.parts, entries["validation"], strict=False):
            for entry in files:
                entry["part"] = part
        return {split: list(chain(*files)) for split, files in entries.items()}


def read_batches(source: Source, position: Any, problems: Problems, bar: Bar) -> Iterator[Batch]:
    """The documents behind `position`."""
    texts: list[str] = []
    parts: list[int] = []
    chars, skipped = 0, dict(problems.counts)
    for text in source.documents(position, problems, bar):
        bar.first_document()
        texts.append(text)
        parts.append(source.part)
        chars += len(text)
        # Both of the same place: what is left out behind the last document is read again after a kill.
        skipped = dict(problems.counts)
        if chars >= BATCH_CHARS:
            position = source.position
            yield Batch(texts, position, skipped, parts)
            texts, parts, chars = [], [], 0
    yield Batch(texts, source.position if texts else position, skipped, parts)


def unigram_entropy(counts: np.ndarray[Any, Any]) -> float:
    """-sum p ln p [nats per token]."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
