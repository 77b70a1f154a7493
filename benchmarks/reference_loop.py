"""A plain training loop in the style of nanoGPT's train.py, to measure ours against.

One process, one model, no checkpoints, no curves, no checks. It takes our settings, schedule, clipping and order of the
data, so that its losses can be compared with ours step by step; everything else is its own, but for the --model:

    nanogpt        a GPT-2 as nanoGPT writes it, with our initial parameters
    transformers   GPT2LMHeadModel of `transformers` with its own initial parameters, all of which decay
    paired         GPT2LMHeadModel with our initial parameters, and what we let decay decays: only rounding differs

    python benchmarks/reference_loop.py --preset gpt2-nano --corpus DIR --set steps=200 compile=true

Prints one line of JSON: losses [nats per token]; points, the step and the clock after every step but the first
--warm-up; peak_reserved, what torch's allocator held [bytes], null on the CPU; of GPT2LMHeadModel validation_loss, on
the sequences that `aura train` takes; took, the seconds of all of it but the start of Python.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aura.commands.flags import parse_assignments
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import TOKENIZER, read_corpus
from aura.corpus.sequences import Order, Sequences
from aura.model.export import export
from aura.model.gpt import GPT as OurGPT
from measuring import options
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(d, 3 * d), "c_proj": nn.Linear(d, d)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(d, 4 * d), "c_proj": nn.Linear(4 * d, d)})

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        qkv = self.attn["c_attn"](self.ln_1(x)).split(C, dim=2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.attn["c_proj"](y)
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class GPT(nn.Module):
    """The modules are named as in GPT-2, so that our parameters can be loaded."""

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, config.d_model)
        self.wpe = nn.Embedding(config.seq_len, config.d_model)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss [nats per token] of (batch, time) token ids."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
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


class OfTransformers(nn.Module):
    def __init__(self, config: TrainConfig, corpus: Path, ours: bool) -> None:
        """ours: our initial parameters, by the way that a trained model takes to transformers."""
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(config.seed)
        names: dict[str, Any] = {"n_embd": config.d_model, "n_layer": config.layers, "n_head": config.heads}
        sizes = {"vocab_size": config.vocab_size, "n_positions": config.seq_len, **names}
        no_dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
        if ours:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, "initial")
                export(config, OurGPT(config).state_dict(), corpus / TOKENIZER, path)
                self.model = GPT2LMHeadModel.from_pretrained(path)
        assert self.model.config.vocab_size == config.vocab_size, (
            "a smaller vocabulary would be another model"
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of(kind: str, config: TrainConfig, corpus: Path, device: str) -> nn.Module:
    if kind != "nanogpt":
        return OfTransformers(config, corpus, ours=kind == "paired").to(device)
    initial = OurGPT(config, device).state_dict()
    model = GPT(config, len(initial["wte.weight"])).to(device)
    model.load_state_dict({**initial, "lm_head.weight": initial["wte.weight"]})
    return model


def train(
    config: TrainConfig, corpus: Path, steps: int, warm_up: int = 0, kind: str = "nanogpt"
) -> dict[str, Any]:
    """Train for the first `steps` of the configuration."""
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert config.precision in ("fp32", "bf16") and not config.dropout
    autocast = nullcontext() if config.precision == "fp32" else torch.autocast(device, torch.bfloat16)

    model = model_of(kind, config, corpus, device).train()
    parameters = list(model.parameters())
    decaying = 0 if kind == "transformers" else 2  # dimensions, at least
    groups = [
        {"params": [p for p in parameters if p.dim() >= decaying], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < decaying], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)
    forward = torch.compile(model) if config.compile == "true" else model

    opened = read_corpus(corpus)
    sequences, validation = (Sequences(opened, split, config.seq_len) for split in ("train", "validation"))
    order = Order(len(sequences), config.seed)
    position = 0

    def get_batch() -> tuple[Tensor, Tensor]:
        nonlocal position
        x, y = sequences.read(order.at(position, config.batch_size))
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
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if device == "cuda":
            torch.cuda.synchronize()  # once a step: the clock below means something
        points.append((step, time.perf_counter()))
    return {
        "losses": [loss.item() for loss in losses],
        "points": points[warm_up:],
        "peak_reserved": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "validation_loss": None if kind == "nanogpt" else validation_loss(model, validation, config),
        "took": time.perf_counter() - began,
    }


@torch.no_grad()
def validation_loss(model: nn.Module, sequences: Sequences, config: TrainConfig) -> float:
    """The mean over the sequences that `aura train` validates on [nats per token]."""
    count = min(len(sequences), config.validation_windows)
    chosen = np.array([i * len(sequences) // count for i in range(count)])
    parts = np.array_split(chosen, -(-count // config.batch_size))
    device = next(model.parameters()).device
    model.eval()
    total = sum(model(*(t.to(device) for t in sequences.read(part))).item() * len(part) for part in parts)
    return total / count


def main() -> int:
    parser = options(__doc__, text=False)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--corpus", type=Path, required=True, metavar="DIR")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--model", choices=("nanogpt", "transformers", "paired"), default="nanogpt")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="end early (the schedule stays)")
    parser.add_argument("--warm-up", type=int, default=0, metavar="STEPS", help="not among the points (0)")
    given = parser.parse_args()
    config = resolve(given.preset, parse_assignments(given.set))
    steps = min(config.steps, given.stop_after or config.steps)
    print(json.dumps(train(config, given.corpus, steps, given.warm_up, given.model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
