"""Losses in bits per byte of text: a loss per token compares with one tokenizer only, one per byte with all."""

from __future__ import annotations

import math
from collections.abc import Callable

from aura.corpus.corpus import Corpus
from aura.corpus.sequences import ByPart
from aura.texts.console import text


def bits_per_byte(corpus: Corpus, say: Callable[[str], None]) -> ByPart:
    """What one nat per token of the validation text is in bits per byte of it, as a whole and by part.

    The bytes were counted when the corpus was prepared, from the text and not from its tokens: a tokenizer may
    normalise. Where a corpus lacks them, as earlier releases made it, `say` hears that it gets the mean of all its
    text.
    """
    tokens: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for entry in corpus.files["validation"]:
        if "text_bytes" not in entry:
            say(text("bytes_of_validation_unknown", path=corpus.path))
            return ByPart(sum(corpus.tokens.values()) / corpus.text_bytes / math.log(2), {})
        part = entry.get("part", "")
        tokens[part] = tokens.get(part, 0) + entry["tokens"]
        sizes[part] = sizes.get(part, 0) + entry["text_bytes"] * math.log(2)
    return ByPart.ratio(tokens, sizes)
