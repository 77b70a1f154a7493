"""The parameters of a model, family by family, without the model. Standard library only.

GPT-2, output tied to the embedding: each block has four matrices, their biases and two LayerNorms. HRM-Text, output not
tied: five matrices of attention and three of SwiGLU in each block, and no other parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from aura.config import TrainConfig

# HRM-Text. L is called so often before each call of H, and both so often as H has cycles.
HIGH_CYCLES, LOW_CYCLES = 2, 3
CALLS = HIGH_CYCLES * (LOW_CYCLES + 1)
# How many of these calls get gradients: at first, later, and the part of the run over which it becomes so.
SHALLOWEST, DEEPEST, DEEPENING = 2, 5, 0.2


@dataclass(frozen=True)
class Matrix:
    rows: int
    columns: int
    parts: int = 1  # below one another, each a matrix by itself

    def __len__(self) -> int:
        return self.rows * self.columns


def is_recurrent(config: TrainConfig) -> bool:
    return config.family == "hrm-text"


def mlp_width(config: TrainConfig) -> int:
    """Of SwiGLU: two thirds of GPT-2's, so that three matrices are as large as two, in multiples of 256."""
    return 256 * math.ceil(round(8 * config.d_model / 3) / 256)


def matrices_of_a_block(config: TrainConfig) -> list[Matrix]:
    d = config.d_model
    if is_recurrent(config):
        width = mlp_width(config)
        return [Matrix(d, d)] * 5 + [Matrix(width, d)] * 2 + [Matrix(d, width)]
    return [Matrix(3 * d, d, parts=3), Matrix(d, d), Matrix(4 * d, d), Matrix(d, 4 * d)]


def vectors_of_a_block(config: TrainConfig) -> list[int]:
    """Elements."""
    d = config.d_model
    return [] if is_recurrent(config) else [3 * d, 4 * d, d, d, d, d, d, d]


def outside_the_blocks(config: TrainConfig) -> list[int]:
    """Elements, with the unused rows."""
    d, embedding = config.d_model, rows(config) * config.d_model
    return [embedding, embedding] if is_recurrent(config) else [embedding, config.seq_len * d, d, d]


def stored_parameters(config: TrainConfig) -> int:
    """With the unused rows of embedding and output matrix."""
    block = sum(map(len, matrices_of_a_block(config))) + sum(vectors_of_a_block(config))
    return sum(outside_the_blocks(config)) + config.layers * block


def parameter_count(config: TrainConfig) -> int:
    """Without the unused rows."""
    unused = (rows(config) - config.vocab_size) * config.d_model
    return stored_parameters(config) - unused * (2 if is_recurrent(config) else 1)


def rows(config: TrainConfig) -> int:
    return math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple


def with_vocabulary(config: TrainConfig, tokens: int) -> TrainConfig:
    """For a corpus of so many different tokens, where the embedding has the rows for them.

    GPT-2's tokenizer with a padding token has one id more than the presets' 50257.
    """
    fits = config.vocab_size < tokens <= rows(config)
    return replace(config, vocab_size=tokens) if fits else config


def backward_depth(step: int, steps: int) -> int:
    """HRM-Text: how many calls of the stacks get gradients in this step (from 0) of so many."""
    return SHALLOWEST + int(min(1.0, step / (steps * DEEPENING)) * (DEEPEST - SHALLOWEST))


@lru_cache(maxsize=64)
def mean_depth(first: int, last: int, steps: int) -> float:
    """Of the steps from `first` to before `last`."""
    deep = max(first, min(last, math.ceil(steps * DEEPENING)))
    early = sum(backward_depth(step, steps) for step in range(first, deep))
    return (early + DEEPEST * (last - deep)) / (last - first)
