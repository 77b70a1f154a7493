"""What a tokenizer makes of a text: encoded, decoded and compared.

A model learns nothing but ids. So a sample of the corpus goes there and back before the work begins, and every
character that comes up later goes there and back where it first stands.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

from aura.corpus.sentencepiece_model import SentencePiece
from aura.corpus.tokenizer import Prepared, has_byte_level, one_sentence
from aura.errors import DataError
from aura.texts import console

SAMPLE = 1_000_000  # characters, from the beginning
READ = 20_000_000  # characters in which others than those of the sample are looked for
AROUND, FURTHEST = 40, 500  # characters on either side of a new one; up to the end of a word
EXAMPLES = 3
AT_ONCE = 16  # texts of the sample: nothing hears a signal while they are encoded
# A long text in parts; a word is cut where it is as long.
SPANS = re.compile(r"(?s).{1,10000}(?!\S)|.{1,10000}")
SHOWN = 60  # characters of an example
# What an example is cut from a text by: a word, a line break with the words beside it, two words.
PARTS = (r"\S+", r"\S{0,15}[^\S\n]*\n\s*\S{0,15}", r"\S{1,15}\s+\S{1,15}")


@dataclass(frozen=True)
class Change:
    before: str
    after: str
    lost: int  # characters; 0: the tokenizer's own rules change the text, such as lower case
    document: int = 0  # its number, from 1, where it is known

    def __str__(self) -> str:
        place = console.text("in_document", number=self.document) if self.document else ""
        before, after = _shortened(self.before), _shortened(self.after)
        return console.text("tokenizer_example", place=place, before=before, after=after)


# The number of a text in its batch, a character in it, and where that does not come back, an example.
New = tuple[int, str, Change | None]


class RoundTrip:
    """A tokenizer's name and its tokenizer.json -> what comes back of texts. `tried`: characters that were, as the
    vocabulary has them: where it has other entries for the end of a word, "ñ" and "ñ</w>" are two."""

    def __init__(self, name: str, tokenizer_json: str, tried: Iterable[str] = ()) -> None:
        self.name = name
        described = json.loads(tokenizer_json)
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.encode_special_tokens = True  # as it encodes documents
        decoder = described["decoder"] or {}
        if decoder.get("type") == "WordPiece":  # its cleaning up makes "don't" of "do not"
            self.tokenizer.decoder = decoders.WordPiece(decoder["prefix"], cleanup=False)
        elif not decoder and described["model"]["type"] in ("BPE", "Unigram"):
            self.tokenizer.decoder = (
                decoders.Fuse()
            )  # otherwise spaces are put between pieces, and hide those lost
        self.spelt: dict[int, str] = {}  # added words: this decoder would read their letters as bytes
        if has_byte_level(decoder):
            added = self.tokenizer.get_added_tokens_decoder()
            self.spelt = {number: _bytes_as_letters(token.content) for number, token in added.items()}
        self.unknown = _unknown_token(described["model"])
        # Without an unknown token, what such a vocabulary lacks is dropped, and nothing counts it at the end.
        affixes = [
            described["model"].get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")
        ]
        self.affixes = affixes if any(affixes) and not self.unknown else None
        self.tried = set(tried)

    def changes(self, texts: list[str]) -> list[Change | None]:
        """None for a text that comes back as it was. Raises DataError where the tokenizer fails."""
        with one_sentence(self.name, error=DataError):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            decoded = self._decoded([encoding.ids for encoding in encodings])
        return [
            None if back.strip() == text.strip() else Change(text, back, self._lost(text, back))
            for text, back in zip(texts, decoded, strict=True)
        ]

    def _decoded(self, ids: list[list[int]]) -> list[str]:
        if all(map(self.spelt.keys().isdisjoint, ids)):
            return self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        token, decode = self.tokenizer.id_to_token, self.tokenizer.decoder.decode
        return [decode([self.spelt.get(number) or token(number) for number in text]) for text in ids]

    def _lost(self, text: str, back: str) -> int:
        """Characters of the text, behind the tokenizer's own normalizer, that do not come back. White space counts
        where the model is given it."""
        wanted, before = self._normal(text), self.tokenizer.pre_tokenizer
        spans = before.pre_tokenize_str(wanted) if before else [("", (0, len(wanted)))]
        given = _spaces("".join(wanted[first:last] for _, (first, last) in spans)).strip()
        counts = Counter("".join(_spaces(wanted).split())) + Counter(filter(str.isspace, given))
        return (counts - Counter(_spaces(self._normal(back)))).total()

    def _normal(self, text: str) -> str:
        text = text.replace(self.unknown, "") if self.unknown else text
        normalizer = self.tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def around_new(self, text: str, tried: set[str]) -> dict[str, str]:
        """Every character that is not yet among those `tried`, and is then, with its surroundings."""
        if self.affixes:
            text = self._normal(text)
            first = self._places_in_words(text)
        else:
            first = {character: text.index(character) for character in set(text) - tried}
        new = sorted(first.keys() - tried, key=first.__getitem__)
        tried.update(new)
        return {piece: _surroundings(text, first[piece]) for piece in new}

    def _places_in_words(self, text: str) -> dict[str, int]:
        """Of every character, as the vocabulary has it, the first."""
        assert self.affixes
        prefix, suffix = self.affixes
        before, places = self.tokenizer.pre_tokenizer, dict[str, int]()
        for word, (begin, end) in before.pre_tokenize_str(text) if before else [(text, (0, len(text)))]:
            for number, character in enumerate(word):
                piece = f"{prefix or ''}{character}" if number else character
                piece += (suffix or "") if number == len(word) - 1 else ""
                places.setdefault(piece, min(begin + number, end - 1))
        return places

    def try_new(self, texts: list[str]) -> list[New]:
        """Of every character that was not tried before: the first of these texts that has it. It stays new, because
        that text may not get into the corpus."""
        tried = set(self.tried)
        new = [
            (number, *found)
            for number, text in enumerate(texts)
            for found in self.around_new(text, tried).items()
        ]
        if not new:
            return []
        changes = self.changes([around for _, _, around in new])
        return [
            (number, piece, self.examples([(0, around)], True)[0] if change and change.lost else None)
            for (number, piece, around), change in zip(new, changes, strict=True)
        ]

    def examples(self, texts: list[tuple[int, str]], lost: bool) -> list[Change]:
        """The shortest parts of these that are changed: of lost letters a few, otherwise one of each kind. With each
        text the number of its document, 0 where nobody knows it."""
        found: dict[str, Change] = {}
        for pattern in (*PARTS, r"(?s).+"):
            if found and pattern not in PARTS:
                break
            for document, text in texts:
                parts = [part for part in dict.fromkeys(re.findall(pattern, text)) if part not in found]
                changed = (one for one in self.changes(parts) if one and bool(one.lost) == lost)
                found |= {one.before: replace(one, document=document) for one in islice(changed, 1)}
                if len(found) == EXAMPLES:
                    return list(found.values())
                if found and not lost:
                    break
            if found and lost:
                break
        return list(found.values())


@dataclass
class Tried:
    """What came of a sample."""

    characters: int = 0
    lost: int = 0
    texts: int = 0
    altered: int = 0
    # The first texts that are changed, with the numbers of their documents, by whether something of them is lost
    first: dict[bool, list[tuple[int, str]]] = field(default_factory=lambda: {True: [], False: []})

    def add(self, document: int, text: str, change: Change | None) -> None:
        self.characters += len(text)
        self.texts += 1
        if change:
            self.lost += change.lost
            self.altered += 1
            if len(self.first[bool(change.lost)]) < EXAMPLES:
                self.first[bool(change.lost)].append((document, text))

    def sentence(self, name: str, trip: RoundTrip) -> str:
        """What is lost; where nothing is, what is altered."""
        examples = listed(trip.examples(self.first[self.lost > 0], self.lost > 0))
        if self.lost:
            values = {"lost": self.lost, "total": self.characters, "examples": examples}
            return console.text("text_is_lost", name=name, **values)
        return console.text(
            "text_is_altered", name=name, count=self.altered, total=self.texts, examples=examples
        )


def check(
    name: str,
    prepared: Prepared,
    documents: Iterable[str],
    most: int,
    accept: bool,
    say: Callable[[str], None],
) -> set[str]:
    """Does this tokenizer keep the text, and is it what SentencePiece makes of it? `most`: characters that are read.
    Returns what was tried, as `RoundTrip` has it. Raises DataError, ConfigError.
    """
    trip, tried = RoundTrip(name, prepared.json), Tried()
    theirs = SentencePiece(Path(prepared.sentencepiece)) if prepared.sentencepiece else None
    sample = _sample(documents, trip, min(most, READ))
    while some := list(islice(sample, AT_ONCE)):
        changes = trip.changes([text for _, text in some])
        for (document, text), change in zip(some, changes, strict=True):
            tried.add(document, text, change)
            if theirs:
                theirs.check_same(trip.tokenizer, text)
    if theirs:
        theirs.check_symbols(trip.tokenizer)
    if tried.altered:
        sentence = tried.sentence(name, trip)
        if tried.lost and not accept:
            raise DataError("tokenizer_loses_text", loss=sentence)
        say(sentence)
    return trip.tried


def _sample(documents: Iterable[str], trip: RoundTrip, most: int) -> Iterator[tuple[int, str]]:
    """The beginning whole, and of the rest the surroundings of every new character; with the number of the document."""
    read = 0
    for number, text in enumerate(documents, start=1):
        for part in SPANS.findall(text):
            new = trip.around_new(part, trip.tried).values()
            yield from ((number, some) for some in ([part] if read < SAMPLE else new))
            read += len(part)
            if read >= most:
                return


def _surroundings(text: str, place: int) -> str:
    """No word in it is cut, which would be another word."""
    first, last = max(place - AROUND, 0), min(place + AROUND, len(text))
    while first > 0 and place - first < FURTHEST and not text[first - 1].isspace():
        first -= 1
    while last < len(text) and last - place < FURTHEST and not text[last].isspace():
        last += 1
    return text[first:last]


def listed(changes: Iterable[Change]) -> str:
    return "; ".join(map(str, changes))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _spaces(text: str) -> str:
    """SentencePiece's sign for a space is one."""
    return text.replace("▁", " ")


def _bytes_as_letters(text: str) -> str:
    """As a byte-level BPE writes it: "España" is "EspaÃ±a"."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in letters.pre_tokenize_str(text))


def _unknown_token(model: dict[str, Any]) -> str | None:
    """What stands for that which the vocabulary does not have."""
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")
