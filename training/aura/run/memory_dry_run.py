"""Forward and backward passes from which nothing is learned, before the first step: who lacks the memory hears of it
before the others have waited for it."""

from __future__ import annotations

import torch
from torch import Tensor

from aura.config import TrainConfig
from aura.corpus.sequences import inputs_and_targets
from aura.model.forward import autocast
from aura.model.language_model import LanguageModel
from aura.run.batches import Batches


def run_memory_dry_run(config: TrainConfig, model: LanguageModel, batches: Batches) -> None:
    """The largest micro-batch of a step, at the model's deepest, and once more beside its gradients where a step has
    several. Raises what torch raises where memory ends. Not rehearsed: the optimizer's update, and an exchange with a
    delay. Random numbers and the order of the data stay as they are."""
    if not is_bounded(batches.device):
        return
    device, shape = batches.device, (batches.largest, config.seq_len + 1)
    inputs, targets = inputs_and_targets(torch.zeros(shape, dtype=torch.int64, device=device))
    model.begin_step(config.steps, config.steps)
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        for _ in range(2 if batches.accumulates else 1):
            forward_and_backward(config, model, inputs, targets)
    for parameter in model.parameters():
        parameter.grad = None


def is_bounded(device: torch.device) -> bool:
    """A card has the memory that it has, and computes a micro-batch in no time."""
    return device.type != "cpu"


def forward_and_backward(config: TrainConfig, model: LanguageModel, inputs: Tensor, targets: Tensor) -> None:
    device = inputs.device
    scale = torch.ones((), device=device) if config.precision == "fp16" else None
    with autocast(config, device):
        loss = model.loss_sum(inputs, targets, scale)
    (loss if scale is None else loss * scale).backward()  # type: ignore[no-untyped-call]
