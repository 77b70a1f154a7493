"""What transformers calls the parameters of a model, and how it writes down the shape; family by family."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aura.config import TrainConfig
from aura.model.hrm_text import EPSILON, THETA
from aura.plan.shapes import DEEPEST, HIGH_CYCLES, LOW_CYCLES, mlp_width

MATRIX_OF_A_BLOCK = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")


@dataclass(frozen=True)
class Names:
    model_type: str
    of: Callable[[str], str]  # our parameter's name in transformers
    turned: Callable[[str, Tensor], Tensor]  # to the layout there, and back
    config: Callable[[TrainConfig], dict[str, Any]]  # without vocab_size
    shape: Callable[[Mapping[str, Any]], dict[str, Any]]  # our settings, of such a config


def _gpt2_name(name: str) -> str:
    return f"transformer.{name}"


def _gpt2_turned(name: str, tensor: Tensor) -> Tensor:
    """GPT-2's original code multiplies x @ W ("Conv1D"), torch's Linear x @ W.T."""
    return tensor.t() if MATRIX_OF_A_BLOCK.fullmatch(name) else tensor


def _gpt2_config(config: TrainConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": config.seq_len,
        "n_embd": config.d_model,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    }


def _gpt2_shape(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layers": values["n_layer"],
        "heads": values["n_head"],
        "d_model": values["n_embd"],
        "seq_len": values["n_positions"],
    }


def _hrm_text_name(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def _hrm_text_config(config: TrainConfig) -> dict[str, Any]:
    std = 1 / math.sqrt(config.d_model)
    return {
        "architectures": ["HrmTextForCausalLM"],
        "max_position_embeddings": config.seq_len,
        "hidden_size": config.d_model,
        "intermediate_size": mlp_width(config),
        "num_hidden_layers": config.layers
        // 2,  # of a stack; it multiplies this by the number of calls itself
        "num_attention_heads": config.heads,
        "head_dim": config.d_model // config.heads,
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


def _hrm_text_shape(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layers": 2 * values["num_hidden_layers"],
        "heads": values["num_attention_heads"],
        "d_model": values["hidden_size"],
        "seq_len": values["max_position_embeddings"],
    }


def _as_it_is(name: str, tensor: Tensor) -> Tensor:
    return tensor


NAMES = {
    "gpt2": Names("gpt2", _gpt2_name, _gpt2_turned, _gpt2_config, _gpt2_shape),
    "hrm-text": Names("hrm_text", _hrm_text_name, _as_it_is, _hrm_text_config, _hrm_text_shape),
}
