"""A JSON list, element by element: it may be larger than memory, and need not be one line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from aura.corpus.running_text import CHUNK
from aura.texts import console

SPACE = " \t\n\r"
SHOWN = 40  # characters
STUMP = 16  # characters: no number, word or escape that is cut off is longer


def _number(digits: str) -> int | float:
    """Of ids only somebody else needs all digits; Python refuses more than 4,300 of them."""
    return int(digits) if len(digits) < 20 else float(digits)


DECODER = json.JSONDecoder(parse_int=_number)


class JsonList:
    """`begin`: what was read of the stream already. `longest`: characters of an element."""

    def __init__(self, begin: bytes, stream: IO[bytes], longest: int) -> None:
        self.stream, self.longest = stream, longest
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.place, self.ended = self.decoder.decode(begin), 0, False

    def elements(self) -> Iterator[Any]:
        """Raises ValueError (and UnicodeDecodeError, which is one): what comes behind that cannot be told apart."""
        self._take("[")
        if self._next() != "]":
            yield self._element()
            while self._next() == ",":
                self._take(",")
                yield self._element()
        self._take("]")
        if left := self._next():
            raise ValueError(console.text("list_goes_on", left=left))

    def _next(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self.place < len(self.text):
                if (character := self.text[self.place]) not in SPACE:
                    return character
                self.place += 1
            if not self._read():
                return ""

    def _take(self, wanted: str) -> None:
        if not (found := self._next()):
            raise ValueError(console.text("list_ends"))
        if found != wanted:
            raise ValueError(console.text("list_lacks", wanted=wanted, found=found))
        self.place += 1

    def _element(self) -> Any:
        self._next()
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                is_cut = error.pos >= len(self.text) or error.msg.startswith("Unterminated string")
                if (is_cut or len(self.text) - error.pos < STUMP) and self._read():
                    continue
                if is_cut:
                    raise ValueError(console.text("list_ends")) from None
                # Its position is one in what was read last: nobody finds that in the file.
                raise ValueError(f"{error.msg}: {self.text[error.pos : error.pos + SHOWN]!r}") from None
            if end < len(self.text) or not self._read():  # the rest of a number may come yet
                self.place = end
                return value

    def _read(self) -> bool:
        """Another piece; False at the end."""
        if self.ended:
            return False
        if len(self.text) - self.place > self.longest:
            raise ValueError(console.text("element_too_long", mebibytes=self.longest >> 20))
        piece = self.stream.read(CHUNK)
        self.ended = not piece
        self.text = self.text[self.place :] + self.decoder.decode(piece, self.ended)
        self.place = 0
        return True
