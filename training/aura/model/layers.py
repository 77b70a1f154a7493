"""What HRM-Text and Qwen3 have in common, named as in transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from aura.config import TrainConfig
from aura.families.family import mlp_width
from aura.model.language_model import Linear


def rotation(time: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (time, width of a head) of every position, in fp32 (Su et al., 2021)."""
    speeds = 1 / theta ** (torch.arange(0, width, 2, device=device) / width)
    angles = (torch.arange(time, device=device)[:, None] * speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, heads, time, width of a head); cos and sin (time, width), in fp32 as their products are."""
    one, other = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-other, one), dim=-1) * sin).to(x.dtype)


class SwiGLU(nn.Module):
    """Shazeer, 2020"""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        d, width = config.d_model, mlp_width(config)
        self.gate_proj, self.up_proj = Linear(d, width, bias=False), Linear(d, width, bias=False)
        self.down_proj = Linear(width, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class OutputMatrix(nn.Module):
    """Asked for by a call: that is where `sharded` waits until a module's weights have come."""

    def __init__(self, count: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, d_model))

    def forward(self) -> Tensor:
        return self.weight
