"""GPT-2, as in "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019).

The modules are named as in the original, so an export renames and transposes but never splits or merges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from aura.config import TrainConfig


class Attention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)
        self.c_proj = nn.Linear(config.d_model, config.d_model)

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
        self.c_fc = nn.Linear(config.d_model, 4 * config.d_model)
        self.c_proj = nn.Linear(4 * config.d_model, config.d_model)

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


class GPT(nn.Module):
    """The output matrix is the embedding `wte` itself (tied), so it is no parameter of its own."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.seq_len, self.dropout = config.seq_len, config.dropout
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.wpe = nn.Embedding(config.seq_len, config.d_model)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # GPT-2 scales what is added to the residual stream by 1/sqrt(number of additions).
                depth = 2 * config.layers if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, time) to logits (batch, time, vocab_size)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = functional.dropout(self.wte(tokens) + self.wpe(positions), self.dropout, self.training)
        for block in self.h:
            x = block(x)
        return functional.linear(self.ln_f(x), self.wte.weight)

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, in fp32, summed over all batch * time targets."""
        logits = self(tokens).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
