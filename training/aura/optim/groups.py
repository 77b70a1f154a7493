"""Which rate and which decay a parameter has: matrices of the blocks, embeddings, the output matrix and gains each have
theirs in the configuration."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from aura.config import TrainConfig
from aura.families.known import FAMILIES

EMBEDDINGS = tuple(begin for family in FAMILIES.values() for begin in family.embeddings)
HEAD = "lm_head."


class Group(NamedTuple):
    """What AdamW does alike to all of its parameters."""

    rate: float  # of a step, as a part of that of the matrices: one schedule for all
    weight_decay: float


def group_of(name: str, parameter: Tensor, config: TrainConfig) -> Group:
    """name: a parameter's, or a segment's of it with [start:stop] behind; what has one dimension is a gain or a bias,
    and does not decay. A rate of 0 is that of the matrices."""
    if parameter.dim() < 2:
        return Group((config.gain_lr or config.lr) / config.lr, 0.0)
    if name.startswith(EMBEDDINGS):
        decay = config.weight_decay if config.decay_embeddings else 0.0
        return Group((config.embedding_lr or config.lr) / config.lr, decay)
    if name.startswith(HEAD):
        return Group((config.head_lr or config.lr) / config.lr, config.weight_decay)
    return Group(1.0, config.weight_decay)
