"""What a model consists of and what its forward pass keeps, family by family, without the model. Standard library only.

Whoever plans asks `shape_of`, and need not know the family. GPT-2, output tied to the embedding: each block has four
matrices, their biases and two LayerNorms. HRM-Text, output not tied: five matrices of attention and three of SwiGLU in
each block, and no other parameter.
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


@dataclass(frozen=True)
class Shape:
    """Counts are elements; what is outside of the blocks has the unused rows too."""

    layers: int
    matrices: tuple[Matrix, ...]  # of a block
    vectors: tuple[int, ...]  # of a block
    outside: tuple[int, ...]
    unused: int
    # Of one token in a block that gets gradients
    kept: int  # what matrix products, attention and activation function read, and keep for the backward pass
    widest: int  # what that computes at once: GELU's output, or the gradients of SwiGLU's output and factors
    computed_again: int  # of `kept`, by what torch.compile writes for a GPU: what is cast, and half of SwiGLU
    statistics: int  # of a norm
    norms_in_fp32: bool  # whatever the parameters are in: as torch computes it on a CPU
    biases: int = 0  # of the matrices of a block
    stacks: int = 1
    calls: int = 1  # of stacks, that get gradients
    tied: bool = True  # the output matrix is the embedding, whose gradient has two halves

    @property
    def in_matrices(self) -> int:
        """Of a block."""
        return sum(map(len, self.matrices))

    @property
    def stored(self) -> int:
        """All parameters, with the unused rows of embedding and output matrix."""
        return sum(self.outside) + self.layers * (self.in_matrices + sum(self.vectors))

    @property
    def blocks(self) -> int:
        """That get gradients, as often as they are called."""
        return self.calls * self.layers // self.stacks


@lru_cache(maxsize=64)
def shape_of(config: TrainConfig) -> Shape:
    return _hrm_text(config) if is_recurrent(config) else _gpt2(config)


def _gpt2(config: TrainConfig) -> Shape:
    d, embedding = config.d_model, rows(config) * config.d_model
    return Shape(
        layers=config.layers,
        matrices=(Matrix(3 * d, d, parts=3), Matrix(d, d), Matrix(4 * d, d), Matrix(d, 4 * d)),
        vectors=(3 * d, 4 * d, d, d, d, d, d, d),
        outside=(embedding, config.seq_len * d, d, d),
        unused=embedding - config.vocab_size * d,
        kept=(1 + 3 + 1 + 1 + 4 + 4) * d,
        widest=4 * d,
        computed_again=d,
        statistics=2,
        norms_in_fp32=False,
        biases=9 * d,
    )


def _hrm_text(config: TrainConfig) -> Shape:
    d, embedding, width = config.d_model, rows(config) * config.d_model, mlp_width(config)
    return Shape(
        layers=config.layers,
        matrices=(*[Matrix(d, d)] * 5, Matrix(width, d), Matrix(width, d), Matrix(d, width)),
        vectors=(),
        outside=(embedding, embedding),
        unused=2 * (embedding - config.vocab_size * d),
        kept=(1 + 3 + 1 + 1 + 1 + 1) * d + 4 * width,
        widest=3 * width,
        computed_again=d + width,
        statistics=1,
        norms_in_fp32=True,
        stacks=2,
        calls=DEEPEST,
        tied=False,
    )


def is_recurrent(config: TrainConfig) -> bool:
    return config.family == "hrm-text"


def mlp_width(config: TrainConfig) -> int:
    """Of SwiGLU: two thirds of GPT-2's, so that three matrices are as large as two, in multiples of 256."""
    return 256 * math.ceil(round(8 * config.d_model / 3) / 256)


def parameter_count(config: TrainConfig) -> int:
    """Without the unused rows."""
    return shape_of(config).stored - shape_of(config).unused


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
