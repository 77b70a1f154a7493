"""Several sources as one text, each with a weight: that part of all tokens comes from it.

A source knows documents, a weight means tokens. So every part is read and encoded for itself, and only behind that is
it decided which document comes next: one of the part that has the fewest tokens for its weight so far (stride
scheduling: Waldspurger and Weihl, 1995). A part is then never further from its weight than
about one document. The order follows from documents and weights alone; how far was read ahead, and by how many
processes, changes nothing in it.

A part that is used up ends the mixture: without it the weights could not be kept.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from aura.corpus.encode import Batch, Encoded
from aura.corpus.files import Advance
from aura.corpus.sources import Problems, Source
from aura.texts import console

Read = Callable[[Source, Any, Problems], Iterator[Batch]]  # the batches behind a position
Encode = Callable[[Iterator[Batch]], Generator[tuple[Batch, Encoded], None, None]]


@dataclass(frozen=True)
class Part:
    name: str  # for people; in a mixture no two are alike
    weight: float  # of all tokens; those of all parts make 1
    source: Source


class Mixture:
    """A source whose position holds, of every part: behind which batch it is, how many documents of the next one are
    given, what was left out before that batch, and its documents and tokens so far."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = [replace(part, name=name) for part, name in zip(parts, _names(parts), strict=True)]
        self.name = ", ".join(f"{part.weight:.1%} {part.source.name}" for part in parts)
        self.size: int | None = None  # how much of each is read, the weights decide
        self.position: Any = None

    def identity(self, advance: Advance) -> dict[str, Any]:
        return {"mixture": [{"weight": part.weight, **part.source.identity(advance)} for part in self.parts]}

    def provenance(self, position: Any) -> dict[str, Any]:
        got = [{name: state[name] for name in ("tokens", "documents")} for state in position]
        return {
            "parts": [
                {"name": part.name, "weight": part.weight, **part.source.provenance(None), **counts}
                for part, counts in zip(self.parts, got, strict=True)
            ]
        }

    def documents(self, position: Any, problems: Problems, advance: Advance) -> Iterator[str]:
        """From the beginning, balanced by characters: a sample for the tokenizer, without which there are no tokens."""
        none = dict.fromkeys(problems.counts, 0)
        texts = [
            part.source.documents(None, replace(problems, counts=dict(none)), advance) for part in self.parts
        ]
        given = [0] * len(texts)
        while True:
            behind = min(range(len(texts)), key=lambda number: given[number] / self.parts[number].weight)
            text = next(texts[behind], None)
            if text is None:
                return
            given[behind] += len(text)
            yield text

    def encoded(
        self, position: Any, problems: Problems, read: Read, encode: Encode, most: int | None
    ) -> Generator[tuple[Batch, Encoded], None, None]:
        """The documents in their order, up to the one that reaches `most` tokens. Raises DataError.

        Every part may have `problems.limit` broken places; `problems` gets the sums when all is read.
        """
        states = position or [None] * len(self.parts)
        streams = [_Stream(part, problems, state) for part, state in zip(self.parts, states, strict=True)]
        with closing(encode(_batches(streams, read))) as results:
            for batch, encoded in results:
                streams[batch.part].receive(batch, encoded)
                mixed = _mix(streams, most)
                self.position = [stream.state() for stream in streams]
                skipped = _sum([stream.left_out for stream in streams])
                if mixed:
                    yield Batch([], self.position, skipped), _joined(mixed)
                if _is_full(streams, most) or _furthest_behind(streams).is_used_up():
                    break
        if not _is_full(streams, most):
            last = _furthest_behind(streams)
            problems.say(console.text("part_used_up", name=last.part.name, tokens=last.tokens))
            skipped = _sum([skipped, last.behind_the_last()])
        problems.counts |= skipped


def _names(parts: list[Part]) -> list[str]:
    """No two alike, and without what would end a column of the log."""
    names: list[str] = []
    for part in parts:
        free = name = re.sub(r'[",\s]', "_", part.name.encode(errors="replace").decode())
        for number in count(2):
            if free not in names:
                break
            free = f"{name}-{number}"
        names.append(free)
    return names


@dataclass
class _Document:
    encoded: Encoded
    number: int  # in `encoded`
    ids: slice
    part: int


@dataclass
class _Stream:
    """A part while it is read: what waits to be written, and what the journal must know of it."""

    part: Part
    problems: Problems
    before: dict[str, Any] | None
    # With the ends of its documents.
    waiting: deque[tuple[Batch, Encoded, list[int]]] = field(default_factory=deque)
    ahead: int = 0  # batches that are read and not written yet
    exhausted: bool = False

    def __post_init__(self) -> None:
        before = self.before or {}
        self.position: Any = before.get("position")
        self.given: int = before.get("given", 0)
        self.skipped: dict[str, int] = before.get("skipped", dict.fromkeys(self.problems.counts, 0))
        self.tokens: int = before.get("tokens", 0)
        self.documents: int = before.get("documents", 0)
        # Up to the last document that was given, and in its batch, which need not be read again before the end.
        self.left_out: dict[str, int] = before.get("left_out", self.skipped)
        # What was counted behind this position is met, and counted, again.
        self.problems = replace(self.problems, counts=dict(self.skipped))

    def state(self) -> dict[str, Any]:
        names = ("position", "given", "skipped", "left_out", "tokens", "documents")
        return {name: getattr(self, name) for name in names}

    def receive(self, batch: Batch, encoded: Encoded) -> None:
        self.waiting.append((batch, encoded, np.cumsum(encoded.lengths).tolist()))
        self._leave_finished_batches()

    def take(self) -> _Document:
        batch, encoded, ends = self.waiting[0]
        number = self.given
        begin = ends[number - 1] if number else 0
        self.given, self.left_out = self.given + 1, batch.skipped
        self.documents += 1
        self.tokens += ends[number] - begin
        self._leave_finished_batches()
        return _Document(encoded, number, slice(begin, ends[number]), batch.part)

    def _leave_finished_batches(self) -> None:
        while self.waiting and self.given >= len(self.waiting[0][2]):
            batch, _, ends = self.waiting.popleft()
            self.given -= len(ends)
            self.position, self.skipped = batch.position, batch.skipped
            self.ahead -= 1

    def is_used_up(self) -> bool:
        return self.exhausted and not self.ahead

    def behind_the_last(self) -> dict[str, int]:
        """What is left out there."""
        return {kind: count - self.skipped[kind] for kind, count in self.problems.counts.items()}


def _batches(streams: list[_Stream], read: Read) -> Iterator[Batch]:
    """Of the part first of which the least lies ready for its weight: memory ends at some batches."""
    batches = [read(stream.part.source, stream.position, stream.problems) for stream in streams]
    while numbers := [number for number, stream in enumerate(streams) if not stream.exhausted]:
        number = min(numbers, key=lambda number: streams[number].ahead / streams[number].part.weight)
        batch = next(batches[number], None)
        if batch is None:
            streams[number].exhausted = True
        else:
            streams[number].ahead += 1
            yield replace(batch, part=number)


def _furthest_behind(streams: list[_Stream]) -> _Stream:
    """The first of them, where several are."""
    return min(streams, key=lambda stream: stream.tokens / stream.part.weight)


def _is_full(streams: list[_Stream], most: int | None) -> bool:
    return most is not None and sum(stream.tokens for stream in streams) >= most


def _mix(streams: list[_Stream], most: int | None) -> list[_Document]:
    """All documents whose turn it is, until one is missing."""
    mixed: list[_Document] = []
    while (stream := _furthest_behind(streams)).waiting and not _is_full(streams, most):
        mixed.append(stream.take())
    return mixed


def _joined(documents: list[_Document]) -> Encoded:
    def column(name: str) -> np.ndarray[Any, Any]:
        return np.array([getattr(one.encoded, name)[one.number] for one in documents])

    return Encoded(
        ids=np.concatenate([one.encoded.ids[one.ids] for one in documents]),
        lengths=column("lengths"),
        sizes=column("sizes"),
        hashes=column("hashes"),
        parts=np.array([one.part for one in documents]),
        new=tuple(
            (place, piece, change)
            for place, one in enumerate(documents)
            for number, piece, change in one.encoded.new
            if number == one.number
        ),
    )


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    return {kind: sum(one[kind] for one in counts) for kind in counts[0]}
