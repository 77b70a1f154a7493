"""Where documents come from: files on this machine (`LocalFiles`), or a dataset of the Hugging Face hub
(`HubDataset`, with the library `datasets`; a local directory is a dataset too).

What counts as a document: a line of .jsonl, a row of parquet or of a dataset, a line of text with
--documents-per-line. Other text files hold running text, see aura/corpus/running_text.py.

Both kinds of source are read in a fixed order, a little at a time, and can go on behind any document: `position`
is what must be remembered for that.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from aura.corpus.catalogue import DATASETS
from aura.corpus.files import (
    JSON_LINES,
    Advance,
    digest_of,
    files_below,
    find_files,
    kind_of,
    open_file,
    reading,
    refuse_not_utf8,
    refuse_pipe,
    saved_splits,
)
from aura.corpus.json_list import DECODER, JsonList
from aura.corpus.listener import NOBODY
from aura.corpus.running_text import CHUNK, conversion, encoding_of, no_text, read_documents
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
    parts: tuple[str, ...]  # of a mixture (aura/corpus/mixture.py) the names, otherwise none
    part: int  # of the document that was given last

    @property
    def position(self) -> Any:
        """Behind the document that was given last; JSON."""

    def identity(self, advance: Advance) -> dict[str, Any]:
        """What meta.json remembers: equal identities, equal documents."""

    def provenance(self) -> dict[str, Any]:
        """What meta.json says beside that, for people: licence and url, where they are known."""

    def documents(self, position: Any, problems: Problems, advance: Advance) -> Iterator[str]:
        """The documents behind `position` (None: all of them). Raises DataError."""


class LocalFiles:
    """Files, directories and patterns, in the order given; within a directory by path."""

    parts: tuple[str, ...] = ()
    part = 0

    def __init__(
        self,
        inputs: list[Path],
        column: str = "text",
        documents_per_line: bool = False,
        say: Callable[[str], None] = NOBODY.say,
        strict: bool = False,
        made: Sequence[Path] = (),
    ) -> None:
        """`made`: as find_files has it. `strict`: files that are not UTF-8 are refused, all of them, when the text is
        read for its SHA-256; otherwise when the first is read for its documents, which may be hours later."""
        self.files = find_files(inputs, say, made)
        self.name = ", ".join(map(str, self.files[:3])) + (", …" if len(self.files) > 3 else "")
        self.size: int | None = sum(file.stat().st_size for file in self.files)
        self.column, self.per_line, self.strict = column, documents_per_line, strict
        self.position: Any = None  # [file, documents of it]

    def identity(self, advance: Advance) -> dict[str, Any]:
        not_utf8: dict[Path, int] | None = {} if self.strict else None
        known: dict[str, Any] = {"sha256": digest_of(self.files, advance, not_utf8), "bytes": self.size}
        if not_utf8:
            refuse_not_utf8(not_utf8)
        if self.per_line:
            known["documents_per_line"] = True
        if self.column != "text":
            known["column"] = self.column
        return known

    def provenance(self) -> dict[str, Any]:
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


def read_lines(
    path: Path, stream: IO[bytes], skip: int, problems: Problems, column: str | None
) -> Iterator[str | None]:
    """A document from every line; with `column` a line is a JSON object that has it under this name, or all of them
    are one list."""
    number, offset, begun = 0, 0, False
    while line := stream.readline(LONGEST_LINE):
        first = b"" if begun else line.removeprefix(BOM_UTF8).strip()[:1]
        if column and first == b"[":
            yield from read_list(path, line, stream, skip - number, problems, column)
            return
        begun = begun or bool(first)
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
            except UnicodeDecodeError as error:
                byte = offset - len(line) + error.start
                problems.broken(no_text(path, byte, number, line[error.start]))
            else:
                text = usable(_value_of(text, column) if column and text else text, place, problems, column)
        yield text


@dataclass(frozen=True)
class Unusable:
    """In place of a value; `why` goes behind "file, line 7"."""

    why: str


def _value_of(line: str, column: str) -> object:
    try:
        return _value_in(DECODER.decode(line), column)
    except (ValueError, RecursionError) as error:
        return Unusable(console.text("line_is_no_json", error=error))


def _value_in(record: object, column: str) -> object:
    if isinstance(record, dict) and column in record:
        return record[column]
    return Unusable(console.text("line_has_no_text_under", column=column))


def read_list(
    path: Path, begin: bytes, stream: IO[bytes], skip: int, problems: Problems, column: str
) -> Iterator[str | None]:
    """A document from every element of a JSON list; `begin` was read already. Raises DataError."""
    number = 0
    try:
        for number, record in enumerate(JsonList(begin, stream, LONGEST_LINE).elements(), start=1):
            place = console.text("place_element", path=path, number=number)
            yield usable(_value_in(record, column), place, problems, column) if number > skip else None
    except UnicodeDecodeError as error:
        kind = encoding_of(error.object)
        why = console.text("json_not_utf8", kind=kind, command=conversion(path, kind))
        raise DataError("no_json_list", path=path, number=number + 1, error=why) from None
    except (ValueError, RecursionError) as error:
        raise DataError("no_json_list", path=path, number=number + 1, error=error) from None


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
                    yield _text_of_cell(cell, place, problems, column)
                advance(size * number // rows - told)
                told = size * number // rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("no_parquet", path=path, error=str(error).splitlines()[0]) from None


def _text_of_cell(cell: Any, place: str, problems: Problems, column: str) -> str | None:
    try:
        return usable(cell.as_py(), place, problems, column)
    except UnicodeDecodeError:
        problems.broken(console.text("not_utf8", place=place))
        return None


def usable(value: object, place: str, problems: Problems, column: str | None) -> str | None:
    """The text of a document, wherever it comes from; None where there is none, which `problems` hears."""
    if value is None or (isinstance(value, str) and not value.strip()):
        problems.empty(place)
    elif why := _why_unusable(value, column):
        problems.broken(f"{place} {why}.")
    else:
        return str(value).strip()
    return None


def _why_unusable(value: object, column: str | None) -> str:
    if isinstance(value, Unusable):
        return value.why
    if not isinstance(value, str):
        return console.text("holds_no_text", column=column, value=value)
    if "\0" in value:
        return console.text("has_a_nul_byte")
    try:
        value.encode()
    except UnicodeEncodeError:
        return console.text("half_a_surrogate_pair", column=column)
    return ""


class HubDataset:
    """A dataset by name, or a local directory that is one, through `datasets`, as a stream."""

    parts: tuple[str, ...] = ()
    part = 0

    def __init__(
        self,
        name: str,
        config: str | None,
        split: str | None,
        column: str,
        revision: str | None = None,
    ) -> None:
        """Raises ConfigError."""
        known = DATASETS.get(name)
        if known is None:
            refuse_pipe(Path(name))
            if Path(name).is_file():
                raise ConfigError("dataset_is_a_file", path=name)
        self.path, self.config = (known.path, config or known.config) if known else (name, config)
        self.directory = Path(self.path) if Path(self.path).is_dir() else None
        self.saved = saved_splits(self.directory) if self.directory else {}
        only = next(iter(self.saved)) if len(self.saved) == 1 else "train"
        self.split, self.column = split or only, column
        self.name = f"{self.path}{f' ({self.config})' if self.config else ''}, split {self.split}"
        self.size: int | None = None
        self.revision = revision
        self.licence = known.licence if known else "unknown"
        # Other columns can be many times the text. datasets' parquet reader takes this, others do not.
        self.options = {"columns": [column]} if known and column else {}
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
            if self.licence == "unknown":
                licence = (info.card_data and info.card_data.get("license")) or self.licence
                self.licence = ", ".join(licence) if isinstance(licence, list) else licence
        return {"dataset": self.path, "revision": self.revision, **choice}

    def provenance(self) -> dict[str, Any]:
        page = f"https://huggingface.co/datasets/{self.path}"
        return {} if self.directory else {"licence": self.licence, "url": page}

    def _open(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        choice = {"split": self.split, "revision": self.revision, **self.options}
        if self.saved:
            if self.split not in self.saved:
                raise ValueError(f"Unknown split {self.split!r}: there is {', '.join(self.saved)}")
            return self.saved[self.split].to_iterable_dataset()
        return datasets.load_dataset(self.path, self.config, streaming=True, **choice)

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
                text = usable(row[self.column], place, problems, self.column)
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
