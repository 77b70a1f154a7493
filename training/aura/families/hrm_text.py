"""HRM-Text, output not tied: five matrices of attention and three of SwiGLU in each block, and no other parameter."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from aura.errors import ConfigError
from aura.families.family import (
    AS_LLAMA,
    Family,
    Matrix,
    Names,
    Settings,
    Shape,
    check_no_dropout,
    check_rotation,
    check_tied,
    check_ungrouped,
    head_width,
    mlp_width,
    rows,
)

EPSILON = 1e-6
THETA = 10000.0  # of the rotations, Su et al. 2021
# L is called so often before each call of H, and both so often as H has cycles.
HIGH_CYCLES, LOW_CYCLES = 2, 3
CALLS = HIGH_CYCLES * (LOW_CYCLES + 1)
# How many of these calls get gradients: at first, later, and the part of the run over which it becomes so.
SHALLOWEST, DEEPEST, DEEPENING = 2, 5, 0.2


def check(config: Settings) -> None:
    if config.layers % 2:
        raise ConfigError("hrm_text_has_two_stacks", layers=config.layers)
    check_rotation(config)
    check_no_dropout(config)
    check_ungrouped(config)
    check_tied(config, "false")


def shape(config: Settings) -> Shape:
    d, embedding, width = config.d_model, rows(config) * config.d_model, mlp_width(config)
    return Shape(
        layers=config.layers,
        matrices=(*[Matrix(d, d)] * 5, Matrix(width, d), Matrix(width, d), Matrix(d, width)),
        vectors=(),
        outside=(embedding, embedding),
        unused=2 * (embedding - config.vocab_size * d),
        looked_up=config.vocab_size * d,
        kept=(1 + 3 + 1 + 1 + 1 + 1) * d + 4 * width,
        widest=3 * width,
        computed_again=width,
        cast_again=d,
        in_norm=d,
        statistics=1,
        norms_in_fp32=True,
        stacks=2,
        calls=DEEPEST,
        tied=False,
    )


def calls(config: Settings, steps: range) -> tuple[float, float]:
    """Of both stacks: the mean over these steps."""
    return CALLS / 2, mean_depth(steps.start, steps.stop, config.steps) / 2


def backward_depth(step: int, steps: int) -> int:
    """How many calls of the stacks get gradients in this step (from 0) of so many."""
    return SHALLOWEST + int(min(1.0, step / (steps * DEEPENING)) * (DEEPEST - SHALLOWEST))


@lru_cache(maxsize=64)
def mean_depth(first: int, last: int, steps: int) -> float:
    """Of the steps from `first` to before `last`."""
    deep = max(first, min(last, math.ceil(steps * DEEPENING)))
    early = sum(backward_depth(step, steps) for step in range(first, deep))
    return (early + DEEPEST * (last - deep)) / (last - first)


def others(config: Settings) -> dict[str, Any]:
    std = 1 / math.sqrt(config.d_model)
    return {
        "intermediate_size": mlp_width(config),
        "head_dim": head_width(config),
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "H_cycles": HIGH_CYCLES,
        "L_cycles": LOW_CYCLES,
        # For training there: of the calls of L in each cycle of H, how many get gradients. Here they are the last ones.
        "L_bp_cycles": [0] * (HIGH_CYCLES - 1) + [DEEPEST - HIGH_CYCLES],
        "embedding_scale": 1 / std,
        "initializer_range": std,
        "prefix_lm": False,
        "tie_word_embeddings": False,
    }


HRM_TEXT = Family(
    name="hrm-text",
    check=check,
    shape=shape,
    blocks=("L_module.", "H_module."),
    embeddings=("embed_tokens.",),
    projections=("o_proj.weight", "down_proj.weight"),
    parts={},
    calls=calls,
    names=Names(
        model_type="hrm_text",
        architecture="HrmTextForCausalLM",
        prefix="model.",
        settings=AS_LLAMA,
        others=others,
        stacks=2,
    ),
)
