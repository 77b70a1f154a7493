"""Today's recipe for a size and a length: tokens of a step, and the rates. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDTH = 768  # where the rates below have been found; a wider model takes lower ones
# AdamW's is nanoGPT's, Muon's that of modded-nanogpt's fourth record: 0.025, where an update is as large as ours times
# 0.2 sqrt(768).
RATES = {"adamw": 6e-4, "muon": 4.5e-3}
# Of the matrices' rate. Embeddings: 9e-3 at this width, near nanochat's 8e-3 for its output matrix (modded-nanogpt's
# fourth record has 3.6e-3 for one that is the embedding too); very small models like eight times the rate
# better, and gains as much as the matrices (docs/log.md).
EMBEDDING_PART, GAIN_PART = 2.0, 1.0
BATCH, BATCH_AT = 2**19, 12 * 110_100_480  # tokens of a step, of a run of so many
TOKENS_PER_PARAMETER = 20  # for the best model of a given cost: Hoffmann et al. 2022 (Chinchilla)


@dataclass(frozen=True)
class Recipe:
    """The fields are settings of the same names."""

    global_batch_tokens: int
    lr: float
    embedding_lr: float
    gain_lr: float


def recipe(d_model: int, tokens: float) -> Recipe:
    """Batch and rates of a model of this width, for a run of so many tokens, with Muon.

    The batch grows as tokens^0.383 (Bergsma et al. 2025, arXiv 2505.13738), through 2^19 at the 1.3 billion tokens of
    nanochat's d12 (scripts/base_train.py: 12 for each of 110 million weights), to the nearest power of two. All rates
    go with (d_model / 768)^-1/2, as nanochat's of AdamW. That it also takes them by the root of the batch is left out:
    it says itself that this was not studied, and gpt2-nano with steps of 2^10 tokens bears Muon's rate as it is
    (docs/training.md).
    """
    batch = 2 ** round(math.log2(BATCH * (tokens / BATCH_AT) ** 0.383))
    lr = rate("muon", d_model)
    return Recipe(batch, lr, two_digits(EMBEDDING_PART * lr), two_digits(GAIN_PART * lr))


def rate(optimizer: str, d_model: int) -> float:
    """Of the matrices; an estimate, but where it was found."""
    return two_digits(RATES[optimizer] * math.sqrt(WIDTH / d_model))


def two_digits(value: float) -> float:
    """More of a rate nobody knows."""
    return float(f"{value:.1e}")
