"""Running text, cut into documents.

A document is a run of whole paragraphs (blocks between blank lines) of at least DOCUMENT_CHARS characters, or the
rest of a file. Documents, not lines, are divided between training and validation, so that the validation loss does
not profit from the other half of a sentence.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import IO

from aura.texts import console

DOCUMENT_CHARS = 4096  # a document ends with the first paragraph that reaches this length
LONGEST_DOCUMENT = 65536  # characters; text without blank lines is cut here, at a space
CHUNK = 1 << 20  # bytes read at once
LATIN = "Windows-1252"  # Latin-1 with the quotation marks of Windows
COMPRESSED_BY = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
BLANK_LINES = re.compile(r"\n[ \t]*(?:\n\s*)+")


def read_documents(path: Path, stream: IO[bytes], broken: Callable[[str], None]) -> Iterator[str]:
    """The documents of a UTF-8 text; bytes that are not UTF-8 are left out when `broken` does not raise."""
    text = ""
    for piece, ended in _decoded(path, stream, broken):
        text += piece
        begin = 0
        while (cut := _next_cut(text, begin, ended)) is not None:
            document = text[begin : cut[0]].strip("\ufeff \t\n")
            begin = cut[1]
            if document:
                yield document
        text = text[begin:]


def _decoded(path: Path, stream: IO[bytes], broken: Callable[[str], None]) -> Iterator[tuple[str, bool]]:
    """The text in pieces, with \\n at the end of every line; True comes with the last piece."""
    # Of the bytes not decoded yet: where in the file, behind which line
    data, offset, lines, ended = b"", 0, 0, False
    after_return = ""
    while not ended:
        chunk = stream.read(CHUNK)
        ended = not chunk
        data += chunk
        text, start = after_return, 0
        while start < len(data):
            nul = data.find(0, start)
            end = nul if nul >= 0 else len(data)
            try:
                piece, used = codecs.utf_8_decode(data[start:end], "strict", ended or nul >= 0)
                stop = start + used
                if stop == nul:
                    broken(no_text(path, offset + nul, lines + data.count(b"\n", 0, nul) + 1, 0))
                    stop += 1
            except UnicodeDecodeError as error:
                bad, stop = start + error.start, start + error.end
                piece = data[start:bad].decode()
                line = lines + data.count(b"\n", 0, bad) + 1
                broken(no_text(path, offset + bad, line, data[bad]))
            text += piece
            if stop == start:  # the rest of this letter is in the next chunk
                break
            start = stop
        lines += data.count(b"\n", 0, start)
        offset += start
        data = data[start:]
        # \r\n may be cut between two chunks.
        after_return = "\r" if text.endswith("\r") and not ended else ""
        text = text[: len(text) - len(after_return)]
        yield text.replace("\r\n", "\n").replace("\r", "\n"), ended


class Utf8:
    """Hears the bytes of a file, piece by piece, until some are not UTF-8."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.offset = 0  # of the next piece

    def first_bad(self, piece: bytes, ended: bool) -> int | None:
        """Its offset in the file, if it is in this piece."""
        begun = len(self.decoder.getstate()[0])  # bytes of a letter that the piece before has begun
        try:
            self.decoder.decode(piece, ended)
        except UnicodeDecodeError as error:
            return self.offset - begun + error.start
        self.offset += len(piece)
        return None


def no_text_at(path: Path, offset: int) -> str:
    """`no_text` of a byte of a file that is not compressed. Raises OSError, EOFError."""
    lines, left = 1, offset
    with path.open("rb") as stream:
        while left and (piece := stream.read(min(left, CHUNK))):
            lines += piece.count(b"\n")
            left -= len(piece)
        if not (byte := stream.read(1)):
            raise EOFError("it has become shorter meanwhile")
        return no_text(path, offset, lines, byte[0])


def no_text(path: Path, offset: int, line: int, byte: int) -> str:
    """What to say of a byte that is not UTF-8, or zero, which no text has."""
    if byte == 0:
        return console.text("zero_byte", path=path, offset=offset, line=line)
    kind = encoding_of(bytes([byte])) if offset == 0 else LATIN
    command = conversion(path, kind)
    where = {"path": path, "offset": offset, "line": line, "byte": byte}
    return console.text("byte_not_utf8", **where, kind=kind, command=command)


def conversion(path: Path, kind: str) -> str:
    """The command that writes the file again, as UTF-8."""
    iconv = f"iconv -f {kind.lower()} -t utf8"
    if not (tool := COMPRESSED_BY.get(path.suffix.lower())):
        made = path.with_name(f"{path.stem}-utf8{path.suffix}")
        return f"{iconv} {quote(str(path))} > {quote(str(made))}"
    inner = Path(path.stem)
    made = path.with_name(f"{inner.stem}-utf8{inner.suffix}{path.suffix}")
    return f"{tool} -dc {quote(str(path))} | {iconv} | {tool} > {quote(str(made))}"


def encoding_of(begin: bytes) -> str:
    """What text that begins so, and is not UTF-8, is most likely."""
    return "UTF-16" if begin[:1] in (b"\xfe", b"\xff") else LATIN


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
