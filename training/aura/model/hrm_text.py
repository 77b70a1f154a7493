"""HRM-Text: two stacks of blocks that call each other, one often (L), one seldom (H).

As published in sapientinc/HRM-Text (models/baselines/hrm_nocarry_bp_warmup.py, 2026; Wang et al., "Hierarchical
Reasoning Model", 2025, is its origin) and as HrmTextForCausalLM of transformers computes it, but for one thing: all
attention is causal, since there are no instructions here that would be read in both directions. The modules are named
as in transformers, so an export renames and never splits or merges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from aura.config import TrainConfig
from aura.families.family import head_width, rows
from aura.families.hrm_text import DEEPEST, EPSILON, HIGH_CYCLES, LOW_CYCLES, THETA, backward_depth
from aura.model.language_model import Embedding, LanguageModel, Linear, as_matrix_products_read
from aura.model.layers import OutputMatrix, SwiGLU, rotated, rotation

# Standard deviation of a normal distribution that is cut off at two of its own
TRUNCATED = 0.87962566103423978


def norm(x: Tensor) -> Tensor:
    """Root mean square 1, without parameters (Zhang and Sennrich, 2019)."""
    return functional.rms_norm(x, x.shape[-1:], eps=EPSILON)


def truncated_normal(tensor: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Overwrites the tensor. Cut off where the normal distribution has two of its own standard deviations."""
    wide = std / TRUNCATED
    return nn.init.trunc_normal_(tensor, std=wide, a=-2 * wide, b=2 * wide, generator=generator)


class Attention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.heads
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, d, bias=False) for _ in range(3))
        self.o_proj, self.gate_proj = Linear(d, d, bias=False), Linear(d, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (batch, time, d_model)
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (made(x).view(shape).transpose(1, 2) for made in (self.q_proj, self.k_proj, self.v_proj))
        y = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True
        )
        gate = torch.sigmoid(self.gate_proj(x))
        return self.o_proj(gate * y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(as_matrix_products_read(norm(x)), cos, sin)
        return x + self.mlp(as_matrix_products_read(norm(x)))


class Stack(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers // 2))


class HrmText(LanguageModel):
    """Half of the layers are in each stack. `z_L_init`, where L begins, is drawn and never trained."""

    vocabulary = frozenset({"embed_tokens.weight", "lm_head.weight"})
    z_L_init: Tensor

    def __init__(self, config: TrainConfig, device: torch.device | str = "cpu") -> None:
        super().__init__(config)
        self.head_width, self.depth = head_width(config), DEEPEST
        with torch.device(device):
            self.embed_tokens = Embedding(rows(config), config.d_model)
            self.L_module, self.H_module = Stack(config), Stack(config)
            self.lm_head = OutputMatrix(rows(config), config.d_model)
            self.register_buffer("z_L_init", torch.empty(config.d_model))
        self.begin(config, device)

    @torch.no_grad()
    def _initialise(self, config: TrainConfig) -> torch.Generator:
        generator = super()._initialise(config)
        start = torch.empty(config.d_model, device=self.z_L_init.device)
        self.z_L_init.copy_(truncated_normal(start, 1.0, generator))
        return generator

    def _draw(self, matrix: Tensor, std: float, generator: torch.Generator) -> None:
        """LeCun's, as published: normal, cut off at two standard deviations, variance 1 / inputs; the embedding is
        scaled to variance 1 where it is read."""
        truncated_normal(matrix, 1 / math.sqrt(matrix.shape[1]), generator)

    def begin_step(self, step: int, steps: int) -> None:
        """Gradients go back through few calls of the stacks at first, through more later."""
        self.depth = backward_depth(step, steps)

    def blocks(self) -> Iterable[nn.Module]:
        return [*self.L_module.layers, *self.H_module.layers]

    def before_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotation(tokens.shape[1], self.head_width, THETA, tokens.device)
        z_h = self.embed_tokens(tokens) * math.sqrt(self.d_model)
        z_l = self.z_L_init.expand_as(z_h)
        # Of the calls that get gradients, the last ones, as many as possible are H's; the last one of L is too.
        of_h = min(HIGH_CYCLES, self.depth - 1)
        of_l = self.depth - of_h
        grad = torch.is_grad_enabled()
        for high in range(HIGH_CYCLES):
            for low in range(LOW_CYCLES):
                left = HIGH_CYCLES * LOW_CYCLES - (high * LOW_CYCLES + low)
                with torch.set_grad_enabled(grad and left <= of_l):
                    z_l = self._call(self.L_module, z_l + z_h, cos, sin)
            with torch.set_grad_enabled(grad and HIGH_CYCLES - high <= of_h):
                z_h = self._call(self.H_module, z_h + z_l, cos, sin)
        return z_h, self.lm_head()

    def _call(self, stack: Stack, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in stack.layers:
            x = self.through(block, x, cos, sin)
        return norm(x)
