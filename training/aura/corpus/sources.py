"""Where documents come from: files on this machine (`LocalFiles`), or a dataset of the Hugging Face hub
(`HubDataset`, with the library `datasets`; a local directory is a dataset too).

What counts as a document: a line of .jsonl, a row of parquet or of a dataset, a line of text with
--documents-per-line. Other text files hold running text, see aura/corpus/running_text.py.

Both kinds of source are read in a fixed order, a little at a time, and can go on behind any document: `position`
is what must be remembered for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from aura.corpus.catalogue import DATASETS, DIALOGUES, LICENCES, check_licence, page_of
from aura.corpus.files import (
    JSON_LINES,
    Advance,
    digest_of,
    files_below,
    find_files,
    kind_of,
    open_file,
    reading,
)
from aura.corpus.listener import NOBODY
from aura.corpus.running_text import CHUNK, no_text, no_text_at, read_documents
from aura.errors import ConfigError, DataError
from aura.texts import console

LONGEST_LINE = 1 << 24  # bytes; a longer document does not fit into memory well once it is encoded
SHOWN = 20  # places that are printed, per kind


@dataclass
class Problems:
    """What could not be used: counted, and the first places of each kind printed.

    More than `limit` broken places end the preparation; documents without text are only counted.
    """

    limit: int
    say: Callable[[str], None]
    counts: dict[str, int] = field(default_factory=lambda: {"broken": 0, "empty": 0})
    quiet: bool = False  # while reading what was counted before

    def broken(self, sentence: str) -> None:
        """Raises DataError."""
        if self.quiet:
            return
        self.counts["broken"] += 1
        if self.counts["broken"] > self.limit:
            key = "one_problem_too_many" if self.limit else "first_problem"
            raise DataError(key, problem=sentence, limit=self.limit)
        self._show("broken", console.text("left_out_place", problem=sentence))

    def empty(self, place: str) -> None:
        if not self.quiet:
            self.counts["empty"] += 1
            self._show("empty", console.text("left_out_empty", place=place))

    def _show(self, kind: str, sentence: str) -> None:
        if self.counts[kind] <= SHOWN:
            self.say(sentence)
        elif self.counts[kind] == SHOWN + 1:
            self.say(console.text("more_problems"))


class Source(Protocol):
    name: str  # for sentences
    size: int | None  # bytes, where they are known

    @property
    def position(self) -> Any:
        """Behind the document that was given last; JSON."""

    def identity(self, advance: Advance) -> dict[str, Any]:
        """What meta.json remembers: equal identities, equal documents."""

    def provenance(self, position: Any) -> dict[str, Any]:
        """What meta.json says beside that, for people: licence and url, where they are known. `position`: behind the
        last document that was taken."""

    def documents(self, position: Any, problems: Problems, advance: Advance) -> Iterator[str]:
        """The documents behind `position` (None: all of them). Raises DataError."""


class LocalFiles:
    """Files, directories and patterns, in the order given; within a directory by path."""

    def __init__(
        self,
        inputs: list[Path],
        column: str = "text",
        documents_per_line: bool = False,
        say: Callable[[str], None] = NOBODY.say,
        strict: bool = False,
    ) -> None:
        """`strict`: files that are not UTF-8 are refused, all of them, when the text is read for its SHA-256; otherwise
        when the first is read for its documents, which may be hours later."""
        self.files = find_files(inputs, say)
        self.name = ", ".join(map(str, self.files[:3])) + (", …" if len(self.files) > 3 else "")
        self.size: int | None = sum(file.stat().st_size for file in self.files)
        self.column, self.per_line, self.strict = column, documents_per_line, strict
        self.position: Any = None  # [file, documents of it]

    def identity(self, advance: Advance) -> dict[str, Any]:
        not_utf8: dict[Path, int] | None = {} if self.strict else None
        known: dict[str, Any] = {"sha256": digest_of(self.files, advance, not_utf8), "bytes": self.size}
        if not_utf8:
            _refuse(not_utf8)
        if self.per_line:
            known["documents_per_line"] = True
        if self.column != "text":
            known["column"] = self.column
        return known

    def provenance(self, position: Any) -> dict[str, Any]:
        return {}

    def documents(self, position: Any, problems: Problems, advance: Advance) -> Iterator[str]:
        first, done = position or (0, 0)
        for file in self.files[:first]:
            advance(file.stat().st_size)
        for number in range(first, len(self.files)):
            skip = done if number == first else 0
            problems.quiet = skip > 0  # running text is decoded again
            for index, text in enumerate(self._records(self.files[number], skip, problems, advance), start=1):
                problems.quiet = index < skip
                if text is not None and index > skip:
                    self.position = [number, index]
                    yield text

    def _records(self, path: Path, skip: int, problems: Problems, advance: Advance) -> Iterator[str | None]:
        """One entry for each document, None for what cannot be used. The first `skip` are not looked at."""
        kind = kind_of(path)
        if kind == ".parquet":
            yield from read_parquet(path, self.column, skip, problems, advance)
            return
        with reading(path), open_file(path, advance) as stream:
            if kind in JSON_LINES:
                yield from read_lines(path, stream, skip, problems, self.column)
            elif self.per_line:
                yield from read_lines(path, stream, skip, problems, None)
            else:
                yield from read_documents(path, stream, problems.broken)


def _refuse(not_utf8: dict[Path, int]) -> NoReturn:
    """Raises DataError."""
    (first, offset), *others = not_utf8.items()
    with reading(first):
        problem = no_text_at(first, offset)
    if others:
        names = ", ".join(str(path) for path, _ in others[:SHOWN]) + (", …" if len(others) > SHOWN else "")
        problem = console.text("more_are_not_utf8", problem=problem, count=len(others), names=names)
    raise DataError("first_problem", problem=problem)


def read_lines(
    path: Path, stream: IO[bytes], skip: int, problems: Problems, column: str | None
) -> Iterator[str | None]:
    """A document from every line; with `column` a line is a JSON object that has it under this name."""
    number, offset = 0, 0
    while line := stream.readline(LONGEST_LINE):
        number, offset, text = number + 1, offset + len(line), None
        place = console.text("place_line", path=path, number=number)
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST_LINE)
                offset += len(line)
            if number > skip:
                problems.broken(console.text("line_too_long", place=place, mebibytes=LONGEST_LINE >> 20))
        elif number > skip:
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not column and "\0" in text:
                    raise ValueError(console.text("has_a_nul_byte"))
                if text and column:
                    text = _text_of(text, column)
                if not text:
                    problems.empty(place)
                    text = None
            except UnicodeDecodeError as error:
                byte = offset - len(line) + error.start
                problems.broken(no_text(path, byte, number, line[error.start]))
                text = None
            except ValueError as error:
                problems.broken(f"{place} {error}.")
                text = None
        yield text


def _text_of(line: str, column: str) -> str:
    """Raises ValueError, whose text goes behind "file, line 7"."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(console.text("line_is_no_json", error=error)) from None
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        raise ValueError(console.text("line_has_no_text_under", column=column))
    text: str = record[column]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(console.text("half_a_surrogate_pair", column=column)) from None
    return text.strip()


def read_parquet(
    path: Path, column: str, skip: int, problems: Problems, advance: Advance
) -> Iterator[str | None]:
    import pyarrow
    from pyarrow import parquet

    size, number, told = path.stat().st_size, 0, 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise DataError("no_column", path=path, column=column, names=", ".join(names))
            rows = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for cell in batch.column(0):
                    number += 1
                    if number <= skip:
                        yield None
                        continue
                    place = console.text("place_row", path=path, number=number)
                    yield _text_of_cell(cell, place, problems)
                advance(size * number // rows - told)
                told = size * number // rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("no_parquet", path=path, error=str(error).splitlines()[0]) from None


def _text_of_cell(cell: Any, place: str, problems: Problems) -> str | None:
    try:
        return usable(cell.as_py(), place, problems)
    except UnicodeDecodeError:
        problems.broken(console.text("not_utf8", place=place))
        return None


def usable(text: object, place: str, problems: Problems) -> str | None:
    """A cell of a table, when there is text in it."""
    if not isinstance(text, str | None):
        problems.broken(console.text("holds_no_text", place=place, kind=type(text).__name__))
        return None
    if not (text and text.strip()):
        problems.empty(place)
        return None
    return text.strip()


class HubDataset:
    """A dataset by name, or a local directory that is one, through `datasets`, as a stream."""

    def __init__(
        self,
        name: str,
        config: str | None,
        split: str | None,
        column: str,
        revision: str | None = None,
        accepted: Collection[str] = (),
    ) -> None:
        """`accepted`: licences that do not allow every use, and that the person has read. Raises ConfigError."""
        known = DATASETS.get(name) or DIALOGUES.get(name)
        if known is None and Path(name).is_file():
            raise ConfigError("dataset_is_a_file", path=name)
        self.path, self.config = (known.path, config or known.config) if known else (name, config)
        self.split, self.column = split or "train", column
        self.name = f"{self.path}{f' ({self.config})' if self.config else ''}, split {self.split}"
        self.size: int | None = None
        self.revision, self.accepted = revision, accepted
        self.directory = Path(self.path) if Path(self.path).is_dir() else None
        self.licence: str | None = None
        if self.directory is None:
            self._comes_under(LICENCES.get(self.path.lower()))
        # datasets' parquet reader takes them, others do not.
        self.options = {"columns": [column]} if known and known.only_text else {}
        self._stream: Any = None
        self._row = 0

    @property
    def position(self) -> Any:
        return {"row": self._row, "stream": self._stream.state_dict()}

    def identity(self, advance: Advance) -> dict[str, Any]:
        choice = {"config": self.config, "split": self.split, "column": self.column}
        if self.directory:
            files = [file for file in files_below(self.directory) if file.is_file()]
            return {"sha256": digest_of(files, advance), **choice}
        with self._one_sentence():
            from huggingface_hub import HfApi

            # What `main` is now: a preparation that is interrupted goes on with the same text.
            info = HfApi().dataset_info(self.path, revision=self.revision)
            self.revision = info.sha
            if self.path.lower() not in LICENCES:
                licence = info.card_data.get("license") if info.card_data else None
                self._comes_under(", ".join(licence) if isinstance(licence, list) else licence)
        return {"dataset": self.path, "revision": self.revision, **choice}

    def _comes_under(self, licence: str | None) -> None:
        """Raises ConfigError."""
        check_licence(self.path, licence, self.accepted)
        self.licence = licence

    def provenance(self, position: Any) -> dict[str, Any]:
        return {} if self.directory else {"licence": self.licence or "unknown", "url": page_of(self.path)}

    def _open(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        choice = {"split": self.split, "revision": self.revision, **self.options}
        return datasets.load_dataset(self.path, self.config, streaming=True, **choice)

    def rows(self) -> Iterator[Any]:
        """As they are, all columns. Raises DataError."""
        with self._one_sentence():
            yield from self._open()

    def documents(self, position: Any, problems: Problems, advance: Advance) -> Iterator[str]:
        with self._one_sentence():
            stream, number = self._open(), 0
            if position:
                number = position["row"]
                stream.load_state_dict(position["stream"])
            for row in stream:
                number += 1
                if self.column not in row:
                    raise ConfigError(
                        "dataset_has_no_column", name=self.name, column=self.column, names=", ".join(row)
                    )
                place = console.text("place_row", path=self.name, number=number)
                text = usable(row[self.column], place, problems)
                if text is not None:
                    advance(len(text.encode()))
                    self._stream, self._row = stream, number
                    yield text

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        try:
            yield
        except (DataError, ConfigError):
            raise
        except Exception as error:  # what the hub, the network and every file format may raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError("dataset_not_read", name=self.name, error=reason) from None
