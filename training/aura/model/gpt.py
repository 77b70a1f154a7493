"""GPT-2, as in "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019).

The modules are named as in the original, so an export renames and transposes but never splits or merges.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from aura.config import TrainConfig
from aura.families.family import rows
from aura.model.language_model import Embedding, LanguageModel, Linear


class Attention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = Linear(config.d_model, 3 * config.d_model)
        self.c_proj = Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, d_model)
        batch, time, width = x.shape
        # each (batch, heads, time, width of a head)
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return functional.dropout(
            self.c_proj(y.transpose(1, 2).reshape(batch, time, width)), self.dropout, self.training
        )


class MLP(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Linear(config.d_model, 4 * config.d_model)
        self.c_proj = Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))
        return functional.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """The output matrix is the embedding `wte` itself (tied), so it is no parameter of its own."""

    vocabulary = frozenset({"wte.weight"})

    def __init__(self, config: TrainConfig, device: torch.device | str = "cpu") -> None:
        super().__init__(config)
        self.dropout = config.dropout
        with torch.device(device):
            self.wte = Embedding(rows(config), config.d_model)
            self.wpe = Embedding(config.seq_len, config.d_model)
            self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.ln_f = nn.LayerNorm(config.d_model)
        self.begin(config, device)

    def blocks(self) -> Iterable[nn.Module]:
        return self.h

    def before_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = functional.dropout(self.wte(tokens) + self.wpe(positions), self.dropout, self.training)
        for block in self.h:
            x = self.through(block, x)
        return self.ln_f(x), self.wte.weight
