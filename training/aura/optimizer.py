"""AdamW (Loshchilov and Hutter, 2019) with torch's own fused kernel.

Not torch.optim.AdamW: its first use imports torch._dynamo, which takes as long as importing torch itself, on every
start of every rank. The kernel is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

EPSILON = 1e-8


class AdamW:
    def __init__(self, model: nn.Module, beta1: float, beta2: float, weight_decay: float) -> None:
        named = dict(model.named_parameters())
        self.beta1, self.beta2 = beta1, beta2
        # Biases and LayerNorms do not decay.
        self.groups = [
            ([name for name, p in named.items() if p.dim() >= 2], weight_decay),
            ([name for name, p in named.items() if p.dim() < 2], 0.0),
        ]
        self.parameters = named
        self.exp_avg = {name: torch.zeros_like(p.data) for name, p in named.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p.data) for name, p in named.items()}
        self.steps = {name: torch.zeros((), device=p.device) for name, p in named.items()}
        self.param_groups: list[dict[str, Any]] = [{"params": list(named.values())}]  # for GradScaler

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for names, weight_decay in self.groups:
            adamw(
                [self.parameters[name] for name in names],
                [grad for name in names if (grad := self.parameters[name].grad) is not None],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                [],
                [self.steps[name] for name in names],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=lr,
                weight_decay=weight_decay,
                eps=EPSILON,
            )

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name: <parameter>.exp_avg, <parameter>.exp_avg_sq, <parameter>.step."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "step": self.steps}
        return {
            f"{name}.{kind}": tensors[name] for name in self.parameters for kind, tensors in kinds.items()
        }
