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

CONV1D = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")  # matrices of GPT-2's blocks


@dataclass(frozen=True)
class Names:
    model_type: str
    architecture: str
    prefix: str  # of all parameters but the output matrix
    settings: Mapping[str, str]  # what ours are called there
    stacks: int  # it counts the layers of one
    others: Callable[[TrainConfig], dict[str, Any]]  # what else is in its configuration, but vocab_size

    def of(self, name: str) -> str:
        return name if name.startswith("lm_head") else self.prefix + name

    def turned(self, name: str, tensor: Tensor) -> Tensor:
        """To the layout there, and back: GPT-2's original code multiplies x @ W ("Conv1D"), torch's Linear x @ W.T."""
        return tensor.t() if CONV1D.fullmatch(name) else tensor

    def config(self, config: TrainConfig) -> dict[str, Any]:
        shape = {theirs: getattr(config, ours) for ours, theirs in self.settings.items()}
        shape[self.settings["layers"]] //= self.stacks
        return {"architectures": [self.architecture], **shape, **self.others(config)}

    def shape(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Our settings, of such a configuration."""
        shape = {ours: values[theirs] for ours, theirs in self.settings.items()}
        return shape | {"layers": self.stacks * shape["layers"]}


def _of_gpt2(config: TrainConfig) -> dict[str, Any]:
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


def _of_hrm_text(config: TrainConfig) -> dict[str, Any]:
    std = 1 / math.sqrt(config.d_model)
    return {
        "intermediate_size": mlp_width(config),
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


OF_GPT2 = {"seq_len": "n_positions", "d_model": "n_embd", "layers": "n_layer", "heads": "n_head"}
OF_HRM_TEXT = {
    "seq_len": "max_position_embeddings",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
NAMES = {
    "gpt2": Names("gpt2", "GPT2LMHeadModel", "transformer.", OF_GPT2, 1, _of_gpt2),
    "hrm-text": Names("hrm_text", "HrmTextForCausalLM", "model.", OF_HRM_TEXT, 2, _of_hrm_text),
}
