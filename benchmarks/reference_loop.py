"""A plain training loop in the style of nanoGPT's train.py, to measure ours against.

One process, one model, no checkpoints, no curves, no checks. It takes our settings, our initial parameters and our
order of the data, so that its losses can be compared with ours step by step; everything else is its own.

    python benchmarks/reference_loop.py --preset gpt2-nano --corpus DIR --set steps=200 compile=true

Prints one line of JSON: losses [nats per token]; points, the step and the clock after every step but the first
--warm-up; peak_reserved, what torch's allocator held [bytes], null on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from aura.config import TrainConfig, parse_assignments, resolve
from aura.corpus.corpus import read_corpus
from aura.corpus.windows import Order, Windows
from aura.model.gpt import GPT as OurGPT
from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.heads, config.dropout
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)
        self.c_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, 4 * config.d_model)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The modules are named as in GPT-2, so that our parameters can be loaded."""

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, config.d_model)
        self.wpe = nn.Embedding(config.seq_len, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss [nats per token] of (batch, time) token ids."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def learning_rate(config: TrainConfig, step: int) -> float:
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    part = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    smallest = config.lr * config.min_lr_ratio
    return smallest + (config.lr - smallest) * 0.5 * (1 + math.cos(math.pi * part))


def train(config: TrainConfig, corpus: Path, steps: int, warm_up: int = 0) -> dict[str, Any]:
    """Train for the first `steps` of the configuration."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)
    scaler = torch.amp.GradScaler(device, enabled=config.precision == "fp16")

    initial = OurGPT(config, device).state_dict()
    model = GPT(config, len(initial["wte.weight"])).to(device)
    model.load_state_dict({**initial, "lm_head.weight": initial["wte.weight"]})
    del initial
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)
    forward = torch.compile(model) if config.compile == "true" else model

    windows = Windows(read_corpus(corpus), "train", config.seq_len)
    order = Order(len(windows), config.seed)
    position = 0

    def get_batch() -> tuple[Tensor, Tensor]:
        nonlocal position
        x, y = windows.read(order.at(position, config.batch_size))
        position += config.batch_size
        if device == "cuda":  # copied while the GPU computes
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x, y

    losses: list[Tensor] = []
    points: list[tuple[int, float]] = []
    x, y = get_batch()
    for step in range(steps):
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=device)
        for _ in range(config.gradient_accumulation_steps):
            with autocast:
                loss = forward(x, y) / config.gradient_accumulation_steps
            x, y = get_batch()
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, config.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if device == "cuda":
            torch.cuda.synchronize()  # once a step: the clock below means something
        points.append((step, time.perf_counter()))
    return {
        "losses": [loss.item() for loss in losses],
        "points": points[warm_up:],
        "peak_reserved": torch.cuda.max_memory_reserved() if device == "cuda" else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", required=True)
    parser.add_argument("--corpus", type=Path, required=True, metavar="DIR")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="end early (the schedule stays)")
    parser.add_argument("--warm-up", type=int, default=0, metavar="STEPS", help="not among the points (0)")
    arguments = parser.parse_args()
    config = resolve(arguments.preset, parse_assignments(arguments.set))
    steps = min(config.steps, arguments.stop_after or config.steps)
    print(json.dumps(train(config, arguments.corpus, steps, arguments.warm_up)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
