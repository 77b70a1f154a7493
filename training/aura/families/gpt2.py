"""GPT-2, output tied to the embedding: each block has four matrices, their biases and two LayerNorms."""

from __future__ import annotations

import re
from typing import Any

from aura.families.family import Family, Matrix, Names, Settings, Shape, check_tied, check_ungrouped, rows


def check(config: Settings) -> None:
    check_ungrouped(config)
    check_tied(config, "true")


def shape(config: Settings) -> Shape:
    d, embedding = config.d_model, rows(config) * config.d_model
    return Shape(
        layers=config.layers,
        matrices=(Matrix(3 * d, d, parts=3), Matrix(d, d), Matrix(4 * d, d), Matrix(d, 4 * d)),
        vectors=(3 * d, 4 * d, d, d, d, d, d, d),
        outside=(embedding, config.seq_len * d, d, d),
        unused=embedding - config.vocab_size * d,
        looked_up=config.seq_len * d,
        kept=(1 + 3 + 1 + 1 + 4 + 4) * d,
        widest=4 * d,
        computed_again=0,
        cast_again=d,
        in_norm=d,
        statistics=2,
        norms_in_fp32=False,
        biases=9 * d,
    )


def others(config: Settings) -> dict[str, Any]:
    return {
        "n_inner": None,
        "activation_function": "gelu_new",
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    }


GPT2 = Family(
    name="gpt2",
    check=check,
    shape=shape,
    blocks=("h.",),
    embeddings=("wte.", "wpe."),
    projections=("c_proj.weight",),
    parts={"c_attn.weight": 3},  # queries, keys and values
    names=Names(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        settings={"seq_len": "n_positions", "d_model": "n_embd", "layers": "n_layer", "heads": "n_head"},
        others=others,
        gguf={"layer_norm_epsilon": "layer_norm_eps"},
        turned=re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight"),  # "Conv1D" in GPT-2's original code
    ),
)
