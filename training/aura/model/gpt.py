"""GPT-2, as in "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019).

The modules are named as in the original, so an export renames and transposes but never splits or merges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from aura.config import TrainConfig
from aura.model.loss import LinearCrossEntropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# torch fills new layers with numbers that `GPT._initialise` would only replace: half a minute for 2.5 billion of them.
class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


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


class GPT(nn.Module):
    """The output matrix is the embedding `wte` itself (tied), so it is no parameter of its own."""

    def __init__(self, config: TrainConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.seq_len, self.vocab_size, self.dropout = config.seq_len, config.vocab_size, config.dropout
        self.loss_chunk, self.gradient_checkpointing = config.loss_chunk, config.gradient_checkpointing
        rows = math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple
        with torch.device(device):
            self.wte = Embedding(rows, config.d_model)
            self.wpe = Embedding(config.seq_len, config.d_model)
            self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.ln_f = nn.LayerNorm(config.d_model)
        self.to(DTYPES[config.parameter_format])
        if torch.device(device).type != "meta":
            self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: TrainConfig) -> None:
        """The same numbers for the same seed, whatever the format and the number of unused rows."""
        generator = torch.Generator(self.wte.weight.device).manual_seed(config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2 scales what is added to the residual stream by 1/sqrt(number of additions).
                std = 0.02 / math.sqrt(2 * config.layers if name.endswith("c_proj.weight") else 1)
                rows = config.vocab_size if name == "wte.weight" else len(parameter)
                drawn = torch.empty(rows, parameter.shape[1], device=parameter.device)
                parameter.zero_()[:rows].copy_(drawn.normal_(std=std, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, time) to logits (batch, time, vocab_size)."""
        return self._logits(self._last_hidden(tokens))

    def _last_hidden(self, tokens: Tensor) -> Tensor:  # (batch, time, d_model)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = functional.dropout(self.wte(tokens) + self.wpe(positions), self.dropout, self.training)
        for block in self.h:
            x = self._recomputed(block, x) if self.gradient_checkpointing else block(x)
        return self.ln_f(x)

    def _logits(self, hidden: Tensor) -> Tensor:
        # The unused rows are no words: they take no part in the softmax.
        return functional.linear(hidden, self.wte.weight)[..., : self.vocab_size]

    def loss_sum(self, tokens: Tensor, targets: Tensor, gradient_scale: Tensor | None = None) -> Tensor:
        """Cross-entropy in nats, in fp32, summed over all batch * time targets.

        gradient_scale: what the result is multiplied with before its backward pass (loss scaling).
        """
        hidden, targets = self._last_hidden(tokens).flatten(0, 1), targets.flatten()
        if not torch.is_grad_enabled():
            parts = zip(self._pieces(hidden), self._pieces(targets), strict=True)
            return torch.stack([self._cross_entropy(part, wanted) for part, wanted in parts]).sum()
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            chunk = self.loss_chunk or len(targets)
            return LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, self.wte.weight, targets, self.vocab_size, chunk, gradient_scale
            )

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self._logits(hidden).float(), targets, reduction="sum")

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor, self.loss_chunk or len(tensor))

    def _recomputed(self, block: nn.Module, x: Tensor) -> Tensor:
        """`block(x)`; of what it computes on the way nothing stays in memory for the backward pass."""
        return checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)

    def parameter_count(self) -> int:
        """Without the unused rows of the embedding."""
        unused = (len(self.wte.weight) - self.vocab_size) * self.wte.weight.shape[1]
        return sum(parameter.numel() for parameter in self.parameters()) - unused
