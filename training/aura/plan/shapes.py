"""What a model consists of and what its forward pass keeps, without the model. Standard library only.

Whoever plans asks `shape_of`, and need not know the family.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from aura.config import TrainConfig
from aura.families.family import Shape, rows
from aura.families.known import FAMILIES


@lru_cache(maxsize=64)
def shape_of(config: TrainConfig) -> Shape:
    return FAMILIES[config.family].shape(config)


def parameter_count(config: TrainConfig) -> int:
    """Without the unused rows."""
    return shape_of(config).stored - shape_of(config).unused


def with_vocabulary(config: TrainConfig, tokens: int) -> TrainConfig:
    """For a corpus of so many different tokens, where the embedding has the rows for them.

    GPT-2's tokenizer with a padding token has one id more than the presets' 50257.
    """
    fits = config.vocab_size < tokens <= rows(config)
    return replace(config, vocab_size=tokens) if fits else config
