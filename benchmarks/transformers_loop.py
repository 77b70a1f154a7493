"""GPT2LMHeadModel of `transformers` with torch's AdamW in a plain loop, to compare what is learnt from equal tokens.

Same corpus, same windows in the same order, same batch, same schedule and clipping; the validation loss is taken on the
windows that `aura train` takes. Model, initial parameters and optimizer are those of the libraries; with --paired the
parameters are ours, and what we let decay decays, so that only the implementations differ.

    python benchmarks/transformers_loop.py --preset gpt2-nano --corpus DIR --set steps=800 --lr 3e-3 6e-3

Prints one line of JSON: for every learning rate, validation_loss [nats per token] and seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aura.config import TrainConfig, parse_assignments, resolve
from aura.corpus.corpus import TOKENIZER, read_corpus
from aura.corpus.windows import Order, Windows
from aura.model.export import export
from aura.model.gpt import GPT
from reference_loop import learning_rate
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(config: TrainConfig) -> GPT2LMHeadModel:
    torch.manual_seed(config.seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.seq_len,
            n_embd=config.d_model,
            n_layer=config.layers,
            n_head=config.heads,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
        )
    )


def ours_in_gpt2(config: TrainConfig, corpus: Path) -> GPT2LMHeadModel:
    """Our initial parameters, by the way that a trained model takes to transformers."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "initial")
        export(config, GPT(config).state_dict(), corpus / TOKENIZER, path)
        model: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(path)
    assert model.config.vocab_size == config.vocab_size, "a smaller vocabulary would be another model"
    return model


def train(config: TrainConfig, corpus: Path, paired: bool) -> dict[str, Any]:
    started = time.perf_counter()
    windows, validation = (
        Windows(read_corpus(corpus), split, config.seq_len) for split in ("train", "validation")
    )
    order = Order(len(windows), config.seed)
    model = (ours_in_gpt2(config, corpus) if paired else gpt2(config)).train()
    dimensions = 2 if paired else 0  # of what decays, at least: with ours, no biases and LayerNorms
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= dimensions]},
        {"params": [p for p in model.parameters() if p.dim() < dimensions], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )
    for step in range(config.steps):
        inputs, targets = windows.read(order.at(step * config.batch_size, config.batch_size))
        loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        optimizer.zero_grad()
    loss_at_end = validation_loss(model, validation, config)
    return {"lr": config.lr, "validation_loss": loss_at_end, "seconds": time.perf_counter() - started}


@torch.no_grad()
def validation_loss(model: GPT2LMHeadModel, windows: Windows, config: TrainConfig) -> float:
    """The mean over the windows that `aura train` validates on [nats per token]."""
    count = min(len(windows), config.validation_windows)
    chosen = np.array([i * len(windows) // count for i in range(count)])
    model.eval()  # type: ignore[no-untyped-call]
    total = 0.0
    for part in np.array_split(chosen, -(-count // config.batch_size)):
        inputs, targets = windows.read(part)
        logits = model(input_ids=inputs).logits.flatten(0, 1)
        total += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
    return total / (count * config.seq_len)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", required=True)
    parser.add_argument("--corpus", type=Path, required=True, metavar="DIR")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates to try (the setting's)")
    parser.add_argument("--paired", action="store_true", help="our initial parameters and groups of decay")
    arguments = parser.parse_args()
    config = resolve(arguments.preset, parse_assignments(arguments.set))
    configs = [replace(config, lr=lr) for lr in arguments.lr or [config.lr]]
    print(json.dumps([train(config, arguments.corpus, arguments.paired) for config in configs]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
