"""Qwen3, output tied to the embedding or not: four matrices of attention, whose queries may share keys and values in
groups, three of SwiGLU, and the gains of four norms in each block."""

from __future__ import annotations

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
    head_width,
    mlp_width,
    rows,
)

EPSILON = 1e-6
# Of the rotations, for sequences of a few thousand tokens. (Qwen3 itself has 1e6, for longer ones.)
THETA = 10000.0


def kv_heads(config: Settings) -> int:
    return config.kv_heads or config.heads


def tied(config: Settings) -> bool:
    """As the small ones of Qwen3's own, unless asked for otherwise."""
    return config.tied != "false"


def check(config: Settings) -> None:
    if config.heads % kv_heads(config):
        raise ConfigError("kv_heads_do_not_divide", heads=config.heads, kv_heads=config.kv_heads)
    check_rotation(config)
    check_no_dropout(config)


def shape(config: Settings) -> Shape:
    d, embedding = config.d_model, rows(config) * config.d_model
    width, head = mlp_width(config), head_width(config)
    kv = kv_heads(config) * head
    vocabularies = 1 if tied(config) else 2
    return Shape(
        layers=config.layers,
        matrices=(
            Matrix(d, d),
            *[Matrix(kv, d)] * 2,
            Matrix(d, d),
            *[Matrix(width, d)] * 2,
            Matrix(d, width),
        ),
        vectors=(d, d, head, head),
        outside=(embedding, d, *[embedding] * (vocabularies - 1)),
        unused=vocabularies * (embedding - config.vocab_size * d),
        looked_up=(vocabularies - 1) * config.vocab_size * d,
        kept=(1 + 3 + 1 + 1) * d + 4 * width,
        widest=2 * width,
        computed_again=width,
        # For the norms of queries and keys, and what attention's output is added to
        cast_again=(d + kv) + d,
        in_norm=d,
        statistics=1,
        norms_in_fp32=True,
        in_head_norms=d + kv,
        head_statistics=config.heads + kv_heads(config),
        norms_on_cpu=2,
        tied=tied(config),
    )


def others(config: Settings) -> dict[str, Any]:
    return {
        "num_key_value_heads": kv_heads(config),
        "intermediate_size": mlp_width(config),
        "head_dim": head_width(config),
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,  # where vLLM looks for it
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied(config),
    }


QWEN3 = Family(
    name="qwen3",
    check=check,
    shape=shape,
    blocks=("layers.",),
    embeddings=("embed_tokens.",),
    projections=("o_proj.weight", "down_proj.weight"),
    parts={},
    names=Names(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        prefix="model.",
        settings=AS_LLAMA,
        others=others,
        gguf={
            "num_key_value_heads": "head_count_kv",
            "rms_norm_eps": "layer_norm_rms_eps",
            "rope_theta": "rope_freq_base",
        },
    ),
)
