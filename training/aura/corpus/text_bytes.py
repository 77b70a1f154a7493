"""Losses in bits per byte of text: a loss per token compares with one tokenizer only, one per byte with all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aura.corpus.corpus import TOKENIZER, Corpus
from aura.corpus.windows import ByPart
from aura.texts.console import text

AT_ONCE = 1 << 20  # tokens


def bits_per_byte(corpus: Corpus, say: Callable[[str], None]) -> ByPart:
    """What one nat per token of the validation text is in bits per byte of it, as a whole and by part.

    The bytes were counted when the corpus was prepared, from the text and not from its tokens: a tokenizer may
    normalise. Where a corpus lacks them, as earlier releases made it, they are those of its tokens if each stands for
    its own bytes; otherwise `say` hears that it gets the mean of all its text.
    """
    tokens: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for entry in corpus.files["validation"]:
        if "text_bytes" not in entry:
            if (lengths := _token_bytes(corpus)) is None:
                say(text("bytes_of_validation_unknown", path=corpus.path))
                return ByPart(sum(corpus.tokens.values()) / corpus.text_bytes / math.log(2), {})
            entry = entry | {"text_bytes": _counted(corpus, entry, lengths)}
        part = entry.get("part", "")
        tokens[part] = tokens.get(part, 0) + entry["tokens"]
        sizes[part] = sizes.get(part, 0) + entry["text_bytes"] * math.log(2)
    return ByPart.ratio(tokens, sizes)


def _token_bytes(corpus: Corpus) -> NDArray[np.int64] | None:
    """Of every token id, 0 for what ends a document; None for tokenizers other than those that are trained here."""
    tokenizer = Tokenizer.from_file(str(corpus.path / TOKENIZER))
    made, added = json.loads(tokenizer.to_str()), tokenizer.get_added_tokens_decoder()
    cut, decoder = made["pre_tokenizer"] or {}, made["decoder"] or {}
    is_ours = cut.get("type") == decoder.get("type") == "ByteLevel" and not cut["add_prefix_space"]
    if not is_ours or made["normalizer"] or not all(token.special for token in added.values()):
        return None
    sizes = np.zeros(corpus.vocab_size, np.int64)
    for piece, number in tokenizer.get_vocab().items():
        sizes[number] = 0 if number in added else len(piece)  # each of its characters is a byte
    return sizes


def _counted(corpus: Corpus, entry: dict[str, Any], lengths: NDArray[np.int64]) -> int:
    ids = np.memmap(corpus.path / entry["name"], f"<u{corpus.bytes_per_token}", "r")
    counts = np.zeros(len(lengths), np.int64)
    for begin in range(0, len(ids), AT_ONCE):
        some = ids[begin : begin + AT_ONCE].astype(np.int64)
        counts += np.bincount(some, minlength=len(lengths))
    return int(counts @ lengths)
