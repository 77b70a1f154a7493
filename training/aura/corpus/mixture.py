"""Several sources as one: the next document is one of the source that has the least text for its weight so far.

A share is therefore one of the text, whatever the lengths of documents, and no source is further from its weight than
a document. `datasets.interleave_datasets` draws documents (docs/decisions/0010-mixtures.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from aura.corpus.files import Advance
from aura.corpus.sources import Problems, Source
from aura.texts import console


@dataclass(frozen=True)
class Part:
    name: str
    weight: float  # above 0; shares are weights divided by their sum
    source: Source


class Mixture:
    """Ends with the first source that is used up: without it the shares could not be kept."""

    def __init__(self, parts: list[Part]) -> None:
        total = sum(part.weight for part in parts)
        self.sources = [part.source for part in parts]
        self.shares = [part.weight / total for part in parts]
        self.parts = _unique_names(parts)
        self.name = ", ".join(
            f"{share:.1%} {source.name}" for share, source in zip(self.shares, self.sources, strict=True)
        )
        self.size: int | None = None  # how much of each is read, the shares decide
        self.part = 0
        self._begin(None)

    def _begin(self, position: Any) -> None:
        self.positions: list[Any] = [None] * len(self.parts)
        self.text_bytes = [0] * len(self.parts)
        if position:
            self.positions, self.text_bytes = position
        self.begun: set[int] = set()

    @property
    def position(self) -> Any:
        now = [
            source.position if number in self.begun else self.positions[number]
            for number, source in enumerate(self.sources)
        ]
        return [now, list(self.text_bytes)]

    def identity(self, advance: Advance) -> dict[str, Any]:
        parts = [
            {"weight": share, **source.identity(advance)}
            for share, source in zip(self.shares, self.sources, strict=True)
        ]
        return {"mixture": parts, "mixture_by": "text"}  # an earlier release mixed by tokens

    def provenance(self) -> dict[str, Any]:
        named = zip(self.parts, self.shares, self.sources, strict=True)
        return {
            "parts": [{"name": name, "weight": share, **source.provenance()} for name, share, source in named]
        }

    def documents(self, position: Any, problems: Problems, advance: Advance) -> Iterator[str]:
        self._begin(position)
        starts = zip(self.sources, self.positions, strict=True)
        texts = [source.documents(start, problems, advance) for source, start in starts]
        while True:
            self.part = min(
                range(len(texts)), key=lambda number: self.text_bytes[number] / self.shares[number]
            )
            text = next(texts[self.part], None)
            if text is None:
                used_up = {"name": self.parts[self.part], "megabytes": self.text_bytes[self.part] / 1e6}
                problems.say(console.text("part_used_up", **used_up))
                return
            self.begun.add(self.part)
            self.text_bytes[self.part] += len(text.encode())
            yield text


def _unique_names(parts: list[Part]) -> tuple[str, ...]:
    """Without what would end a column of the log."""
    names: list[str] = []
    for part in parts:
        name = re.sub(r'[",\s]', "_", part.name.encode(errors="replace").decode())
        names.append(next(free for n in count(1) if (free := f"{name}-{n}" if n > 1 else name) not in names))
    return tuple(names)
