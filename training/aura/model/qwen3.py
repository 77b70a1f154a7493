"""Qwen3, as in its technical report (Yang et al., 2025) and as Qwen3ForCausalLM of transformers computes it.

Rotary positions, grouped queries, queries and keys normalised head by head, SwiGLU, gains but no biases. The modules
are named as in transformers, so an export renames and never splits or merges.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from aura.config import TrainConfig
from aura.families.family import head_width, rows
from aura.families.qwen3 import EPSILON, THETA, kv_heads, tied
from aura.model.language_model import Embedding, LanguageModel, Linear, as_matrix_products_read
from aura.model.layers import OutputMatrix, SwiGLU, rotated, rotation


class RMSNorm(nn.Module):
    """Zhang and Sennrich, 2019"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        # In one format: torch has a kernel for that on a GPU, and none for two.
        return functional.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, EPSILON)


class Attention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        d, self.width = config.d_model, head_width(config)
        self.groups = config.heads // kv_heads(config)
        self.q_proj, self.o_proj = Linear(d, d, bias=False), Linear(d, d, bias=False)
        self.k_proj, self.v_proj = (Linear(d, d // self.groups, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = RMSNorm(self.width), RMSNorm(self.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (batch, time, d_model)
        shape = (*x.shape[:2], -1, self.width)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = (as_matrix_products_read(rotated(part, cos, sin)) for part in (q, k))
        # Repeated here: of torch's kernels for attention only flash attention would share them among heads.
        k, v = (part.repeat_interleave(self.groups, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(as_matrix_products_read(self.input_layernorm(x)), cos, sin)
        return x + self.mlp(as_matrix_products_read(self.post_attention_layernorm(x)))


class Qwen3(LanguageModel):
    """The output matrix is the embedding itself, or one of its own (`tied`)."""

    vocabulary = frozenset({"embed_tokens.weight", "lm_head.weight"})

    def __init__(self, config: TrainConfig, device: torch.device | str = "cpu") -> None:
        super().__init__(config)
        self.head_width = head_width(config)
        with torch.device(device):
            self.embed_tokens = Embedding(rows(config), config.d_model)
            self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = RMSNorm(config.d_model)
            self.lm_head = None if tied(config) else OutputMatrix(rows(config), config.d_model)
        self.begin(config, device)

    def blocks(self) -> Iterable[nn.Module]:
        return self.layers

    def before_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotation(tokens.shape[1], self.head_width, THETA, tokens.device)
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = self.through(block, x, cos, sin)
        return self.norm(x), self.embed_tokens.weight if self.lm_head is None else self.lm_head()
