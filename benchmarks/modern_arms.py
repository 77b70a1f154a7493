"""What `make bench-modern` compares: the arms, their models and the rates that are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from aura.config import TrainConfig
from aura.families.family import mlp_width
from aura.model.family import model_of
from aura.model.language_model import LanguageModel, Linear
from aura.model.qwen3 import Attention, Qwen3
from aura.recipe import EMBEDDING_PART, GAIN_PART
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 512
SIZE = {"layers": 4, "d_model": 96, "heads": 4, "seq_len": 64, "vocab_size": VOCABULARY, "batch_size": 8}
# How it is computed here, and nothing that is learnt: the presets are for cards.
HERE = {
    "vocab_multiple": 1,
    "loss_chunk": 0,
    "precision": "fp32",
    "compile": "false",
    "global_batch_tokens": 0,
    "gradient_accumulation_steps": 1,
    "validation_windows": 800,
}
MUON_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
ADAMW_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
FINER = 2.0  # between two rates; where the best is the first or the last of them, one more is tried
# The rates of embeddings and gains, as parts of that of the matrices: as the recipe has them
OWN_RATES = {"embedding_lr": EMBEDDING_PART, "gain_lr": GAIN_PART}
# So few steps of AdamW need it: GPT-2 learns 0.42 bits per byte less with its preset's 3 % (one seed, lr 4e-3).
LONG_WARMUP = {"warmup_ratio": 0.2}
TOGETHER = {"embedding_lr": 0.0, "gain_lr": 0.0}


@dataclass(frozen=True)
class Arm:
    preset: str = "qwen3-125m"
    settings: Mapping[str, Any] = field(default_factory=dict)  # what differs from the preset's
    own_rates: Mapping[str, float] = field(default_factory=lambda: OWN_RATES)
    rates: tuple[float, ...] = MUON_RATES
    variant: str = ""  # of Qwen3, that no setting makes


RECIPE = {
    "optimizer": "muon",
    "schedule": "wsd",
    "min_lr_ratio": 0.0,
    "warmup_ratio": 0.02,
    "decay_ratio": 0.65,
    "weight_decay": 0.01,
    "decay_embeddings": False,
    "zero_projections": True,
}
MODERN, TODAY = "Qwen3 with the recipe", "GPT-2 with AdamW"
ARMS = {
    MODERN: Arm(),
    TODAY: Arm("gpt2", LONG_WARMUP, own_rates={}, rates=ADAMW_RATES),
    "GPT-2 with the recipe": Arm("gpt2", RECIPE),
    "AdamW in place of Muon": Arm(settings={"optimizer": "adamw", **LONG_WARMUP}, rates=ADAMW_RATES),
    "no norms of queries and keys": Arm(variant="no norms"),
    "cosine to a tenth in place of constant and linear": Arm(
        settings={"schedule": "cosine", "min_lr_ratio": 0.1}
    ),
    "GELU in place of SwiGLU": Arm(variant="gelu"),
    "one rate for all": Arm(own_rates=TOGETHER),
    "projections begin as the others": Arm(settings={"zero_projections": False}),
    "keys and values of each head": Arm(settings={"kv_heads": 0}),
    "embeddings decay": Arm(settings={"decay_embeddings": True}),
}


class GELU(nn.Module):
    """GPT-2's MLP without biases, with as many weights as SwiGLU's three matrices."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        d, width = config.d_model, mlp_width(config) * 3 // 2
        self.up_proj, self.down_proj = Linear(d, width, bias=False), Linear(width, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.gelu(self.up_proj(x), approximate="tanh"))


class WithGELU(Qwen3):
    def _initialise(self, config: TrainConfig) -> torch.Generator:
        for block in self.layers:
            block.mlp = GELU(config)
        return super()._initialise(config)


def model_for(arm: Arm, config: TrainConfig) -> LanguageModel:
    if arm.variant == "gelu":
        return WithGELU(config)
    model = model_of(config)
    if arm.variant == "no norms":
        for block in model.modules():
            if isinstance(block, Attention):
                block.q_norm = block.k_norm = nn.Identity()  # type: ignore[assignment]
    return model
