"""A source without what spoils it: documents that occur twice, and what a cleaner finds (near-duplicates, rubbish).

All documents have to be known before the first is given, so they are read once for that; what goes is written beside
the corpus, with the reason. Whoever goes on after an interruption finds it there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from aura.corpus.files import Advance
from aura.corpus.interrupt import work_directory
from aura.corpus.listener import NOBODY
from aura.corpus.sources import Problems, Source
from aura.durable import replace_text
from aura.errors import DataError
from aura.texts import console

EXAMPLES = 10  # of every reason
EXAMPLE_CHARS = 1000
EXACT = "exact_duplicate"

# Documents with their numbers, a directory to work in -> number, reason and text of those that go.
Cleaner = Callable[[Iterator[tuple[int, str]], Path], Iterator[tuple[int, str, str]]]


class Cleaned:
    """`record`: the file that says what went. `settings`: what the cleaner's answer follows from."""

    def __init__(
        self,
        source: Source,
        record: Path,
        cleaner: Cleaner,
        settings: dict[str, Any],
        say: Callable[[str], None] = NOBODY.say,
    ) -> None:
        self.source, self.record, self.cleaner, self.settings = source, record, cleaner, settings
        self.name, self.size = source.name, source.size
        self.say = say
        self.position: Any = None  # of the source, and how many documents it has given
        self._identity: dict[str, Any] = {}
        self._read = 0  # documents, to know what goes
        self._gone: set[int] | None = None  # numbers of documents, from 0

    def identity(self, advance: Advance) -> dict[str, Any]:
        self._identity = {**self.source.identity(advance), "cleaned": self.settings}
        return self._identity

    def provenance(self, position: Any) -> dict[str, Any]:
        removed = json.loads(self.record.read_text(encoding="utf-8"))["removed"]
        counts = {reason: len(numbers) for reason, numbers in removed.items()}
        return {**self.source.provenance(None), "removed": counts}

    def documents(self, position: Any, problems: Problems, advance: Advance) -> Iterator[str]:
        """What goes is looked for at once, not with the first document: it may take hours, and who iterates may not
        hear signals."""
        gone = self._gone if self._gone is not None else self._removed(problems)
        self._gone = gone
        inner, given = position or (None, 0)
        documents = self.source.documents(inner, problems, advance)

        def kept() -> Iterator[str]:
            for number, text in enumerate(documents, start=given):
                if number not in gone:
                    self.position = [self.source.position, number + 1]
                    yield text

        return kept()

    def _removed(self, problems: Problems) -> set[int]:
        record: dict[str, Any] = {}
        if self.record.is_file():
            with suppress(ValueError):  # damaged
                record = json.loads(self.record.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("of") != self._identity:
            self.say(console.text("cleaning", name=self.name))
            # Counted and said when they are read for the corpus.
            silent = replace(problems, say=NOBODY.say, counts=dict.fromkeys(problems.counts, 0))
            record = {"of": self._identity, **self._look(silent)}
            # A person reads the examples.
            replace_text(self.record, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        for reason, numbers in record["removed"].items():
            self.say(console.text("removed", count=len(numbers), reason=reason))
        self.say(console.text("removed_is_in", path=self.record))
        gone = {number for numbers in record["removed"].values() for number in numbers}
        if gone and len(gone) == record["documents"]:
            raise DataError("all_is_removed", name=self.name, path=self.record)
        return gone

    def _look(self, problems: Problems) -> dict[str, Any]:
        """What goes, by reason: the numbers, and some of the documents."""
        removed: dict[str, list[int]] = {}
        examples: dict[str, list[str]] = {}

        def remove(number: int, reason: str, text: str) -> None:
            removed.setdefault(reason, []).append(number)
            examples.setdefault(reason, [])
            if len(examples[reason]) < EXAMPLES:
                examples[reason].append(text[:EXAMPLE_CHARS])

        work = self.record.with_name(f"{self.record.name}.work")
        with work_directory(work):
            for number, reason, text in self.cleaner(self._different(problems, remove), work):
                remove(number, reason, text)
        return {"documents": self._read, "examples": examples, "removed": removed}

    def _different(
        self, problems: Problems, remove: Callable[[int, str, str], None]
    ) -> Iterator[tuple[int, str]]:
        """Documents that have not occurred before."""
        seen: set[bytes] = set()
        self._read = 0
        for number, text in enumerate(self.source.documents(None, problems, NOBODY.start("", None))):
            self._read += 1
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in seen:
                remove(number, EXACT, text)
            else:
                seen.add(digest)
                yield number, text
