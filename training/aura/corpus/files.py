"""Which files are read, what their names say of them, and their bytes, decompressed."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from aura.corpus.running_text import CHUNK, COMPRESSED_BY, Utf8, no_text_at
from aura.durable import LOST
from aura.errors import DataError
from aura.texts import console

COMPRESSED = tuple(COMPRESSED_BY)
NAMED = 20  # files in one sentence
JSON_LINES = (".jsonl", ".ndjson", ".json")
KINDS = (".txt", *JSON_LINES, ".parquet")
ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar")

Advance = Callable[[int], None]  # called with the number of bytes read


def find_files(inputs: list[Path], say: Callable[[str], None], made: Sequence[Path] = ()) -> list[Path]:
    """The files themselves, and every file of a known kind below directories or behind patterns.

    `made`: directories in which the corpus is made, whose files are no text. `say` hears what else is left out. Raises
    DataError.
    """

    def not_made(found: list[Path]) -> list[Path]:
        # Unlike Path.resolve, this has an answer for a link that leads to itself.
        return [file for file in found if not any(map(Path(os.path.realpath(file)).is_relative_to, made))]

    files: list[Path] = []
    for path in inputs:
        if path.is_file():
            if _unpacked(path).suffix.lower() in ARCHIVES:
                raise DataError("is_an_archive", path=path)
            files.append(path)
        elif path.is_dir():
            files += _of_known_kinds(not_made(files_below(path)), path, say)
        elif glob.has_magic(str(path)):
            names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # absolute, too
            found = [name for name in map(Path, names) if not name.is_dir()]
            files += _of_known_kinds(not_made(found), path, say)
        else:
            refuse_pipe(path)
            raise DataError("does_not_exist", path=path)
    files = list(dict.fromkeys(files))
    for file in files:
        if file.stat().st_size == 0:
            if len(files) == 1:
                raise DataError("is_empty", path=file)
            say(console.text("file_is_empty", path=file))
    return files


def refuse_pipe(path: Path) -> None:
    """Text is read several times: for its SHA-256, for the tokenizer, to encode it, and to go on. Raises DataError."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError("is_a_pipe", path=path)


def saved_splits(directory: Path) -> dict[str, Any]:
    """Of a directory that `save_to_disk` of the library `datasets` has made. load_dataset refuses it, or may take all
    splits for one."""
    if not any((directory / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return {}
    import datasets

    try:
        saved = datasets.load_from_disk(str(directory))
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # of another's; load_dataset says what it thinks of it
    return dict(saved) if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}


def files_below(directory: Path) -> list[Path]:
    """All but directories, by path; links to directories are followed, and no directory is read twice. Raises
    DataError where one cannot be read."""

    def unreadable(error: OSError) -> NoReturn:
        raise DataError("not_read_to_its_end", path=error.filename, error=error.strerror)

    found: list[Path] = []
    seen: set[str] = set()
    for here, directories, names in os.walk(directory, onerror=unreadable, followlinks=True):
        if (real := os.path.realpath(here)) in seen:
            directories.clear()
            continue
        seen.add(real)
        directories[:] = sorted(set(directories) - {LOST})
        found += [Path(here, name) for name in names]
    return sorted(found)


def _of_known_kinds(found: list[Path], where: Path, say: Callable[[str], None]) -> list[Path]:
    """A link that leads nowhere is one of the others."""
    if not found and not where.is_dir():
        raise DataError("pattern_matches_nothing", pattern=where)
    known = [file for file in found if kind_of(file) and file.is_file()]
    if not known:
        raise DataError("no_text_files", path=where)
    if others := sorted(set(found) - set(known)):
        say(console.text("files_not_read", count=len(others), where=where, one=others[0]))
    return known


def _unpacked(path: Path) -> Path:
    """The name without .gz."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def kind_of(path: Path) -> str | None:
    """.txt, .jsonl …, looking through .gz; None for other names."""
    suffix = _unpacked(path).suffix.lower()
    return suffix if suffix in KINDS else None


def digest_of(files: list[Path], advance: Advance, not_utf8: dict[Path, int] | None = None) -> str:
    """SHA-256 of the content of all files in order, and of how they are read; names do not matter.

    `not_utf8` gets the files of text whose bytes are not UTF-8, with the first of these bytes. (What compressed files
    hold is not seen here.)
    """
    digest = hashlib.sha256()
    for file in files:
        kind = kind_of(file) if kind_of(file) != ".txt" else None
        packed = file.suffix.lower() if file.suffix.lower() in COMPRESSED else ""
        digest.update(f"{file.stat().st_size}:{kind or ''}{packed}".encode())
        heard = Utf8() if not_utf8 is not None and not packed and kind != ".parquet" else None
        with reading(file), file.open("rb") as stream:
            ended = False
            while not ended:
                chunk = stream.read(CHUNK)
                ended = not chunk
                digest.update(chunk)
                advance(len(chunk))
                if heard and not_utf8 is not None and (bad := heard.first_bad(chunk, ended)) is not None:
                    not_utf8[file], heard = bad, None
    return digest.hexdigest()


def refuse_not_utf8(not_utf8: dict[Path, int]) -> NoReturn:
    """Raises DataError."""
    (first, offset), *others = not_utf8.items()
    with reading(first):
        problem = no_text_at(first, offset)
    if others:
        names = ", ".join(str(path) for path, _ in others[:NAMED]) + (", …" if len(others) > NAMED else "")
        problem = console.text("more_are_not_utf8", problem=problem, count=len(others), names=names)
    raise DataError("first_problem", problem=problem)


class CountedFile(io.FileIO):
    """Tells how much of the file was read, also when something decompresses it."""

    def __init__(self, path: Path, advance: Advance) -> None:
        super().__init__(path)
        self.advance = advance

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self.advance(count)
        return count


class Streams(io.RawIOBase):
    """All streams of an .xz or a .bz2, with zeros between and behind them; lzma.open and bz2.open end without a word at
    the first that is damaged. Raises EOFError, LZMAError, OSError."""

    def __init__(
        self, file: IO[bytes], kind: type[bz2.BZ2Decompressor] | type[lzma.LZMADecompressor]
    ) -> None:
        self.file, self.kind, self.decoder = file, kind, kind()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self.decoder.eof:
                data = self.decoder.unused_data.lstrip(b"\0")
                while not data:
                    if not (more := self.file.read(CHUNK)):
                        return 0
                    data = more.lstrip(b"\0")
                self.decoder = self.kind()
            elif self.decoder.needs_input and not (data := self.file.read(CHUNK)):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            if piece := self.decoder.decompress(data, len(buffer)):
                buffer[: len(piece)] = piece
                return len(piece)


def open_file(path: Path, advance: Advance) -> IO[bytes]:
    """The content, decompressed."""
    file, packed = io.BufferedReader(CountedFile(path, advance), CHUNK), path.suffix.lower()
    if packed == ".gz":
        return cast(IO[bytes], gzip.open(file))
    if packed in (".xz", ".bz2"):
        kind = lzma.LZMADecompressor if packed == ".xz" else bz2.BZ2Decompressor
        return io.BufferedReader(Streams(file, kind), CHUNK)
    if packed == ".zst":
        import pyarrow  # unlike the package zstandard, it notices that the end is missing

        source = pyarrow.PythonFile(file, mode="r")
        return io.BufferedReader(pyarrow.CompressedInputStream(source, "zstd"), CHUNK)
    return file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError("not_read_to_its_end", path=path, error=error) from None
