"""How many bytes of text tokens stand for: losses per token compare with one tokenizer only, per byte with all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aura.corpus.corpus import TOKENIZER, Corpus
from aura.corpus.windows import ByPart, Windows

AT_ONCE = 64  # windows
SPACE = "▁"  # SentencePiece's


def token_bytes(corpus: Corpus) -> NDArray[np.float64]:
    """Of every token id, UTF-8; 0 for what stands for no text, such as the end of a document.

    A vocabulary that does not say it (neither of bytes nor SentencePiece's) gets the mean of the whole corpus.
    """
    tokenizer = Tokenizer.from_file(str(corpus.path / TOKENIZER))
    decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"], ensure_ascii=False)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size: Callable[[str], int]
    if '"ByteLevel"' in decoder:
        size = len  # each of its characters is a byte
    elif SPACE in decoder:
        size = _bytes_of_piece
    else:
        return np.full(corpus.vocab_size, corpus.text_bytes / sum(corpus.tokens.values()))
    sizes = np.zeros(corpus.vocab_size)
    for piece, token in vocabulary.items():
        sizes[token] = size(piece)
    for token, added in tokenizer.get_added_tokens_decoder().items():
        sizes[token] = 0 if added.special else len(added.content.encode())
    return sizes


def _bytes_of_piece(piece: str) -> int:
    if len(piece) == 6 and piece.startswith("<0x"):
        return 1
    return len(piece.replace(SPACE, " ").encode())


def bits_per_byte(corpus: Corpus, windows: Windows, chosen: NDArray[np.int64]) -> ByPart:
    """What one nat per token, the mean over the targets of these windows, is in bits per byte of their text."""
    sizes = token_bytes(corpus)
    parts = windows.by_part(chosen)
    tokens, text = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0.0)
    for part, own in parts.items():
        for first in range(0, len(own), AT_ONCE):
            _, targets = windows.read(own[first : first + AT_ONCE])
            counted = targets.numpy()[targets.numpy() >= 0]
            tokens[part] += counted.size
            text[part] += float(sizes[counted].sum())
    nats = ByPart.ratio(tokens, text)
    return ByPart(nats.whole / math.log(2), {part: one / math.log(2) for part, one in nats.parts.items()})
