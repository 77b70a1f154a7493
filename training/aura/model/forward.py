"""Forward passes: number formats, batches on their way to the device, the validation loss."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.corpus.sequences import ByPart, Sequences, even_share, inputs_and_targets
from aura.model.language_model import DTYPES, LanguageModel


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    # Parameters in bf16 need no conversion: everything already is.
    enabled = config.precision != "fp32" and config.parameter_format == "fp32"
    # Each weight is used once in a forward pass: keeping the converted copies would only cost memory.
    return torch.autocast(device.type, DTYPES[config.precision], enabled, cache_enabled=False)


def allow_tensor_cores(config: TrainConfig, device: torch.device) -> None:
    """Who trains in bf16 or fp16 has no use for all bits of what is left in fp32: TF32 there, on GPUs that have it."""
    if device.type == "cuda" and config.precision != "fp32":
        torch.set_float32_matmul_precision("high")


def take_deterministic_kernels(config: TrainConfig) -> None:
    """On a GPU attention's backward pass, for one, adds in the order in which its blocks happen to end."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first product
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def to_device(batch: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets. From pinned memory, so that the copy does not wait for what the GPU is still computing:
    only a whole tensor goes that way, a part of its columns would be gathered in other memory first."""
    if device.type != "cpu":
        batch = batch.pin_memory().to(device, non_blocking=True)
    return inputs_and_targets(batch)


def validation_windows(sequences: Sequences, config: TrainConfig) -> NDArray[np.int64]:
    """Evenly spread over the split, and so over the parts of a mixture by how much of it they are."""
    count = min(len(sequences), config.validation_windows)
    return np.arange(count, dtype=np.int64) * len(sequences) // max(1, count)


@torch.no_grad()
def validation_loss(
    model: LanguageModel, sequences: Sequences, config: TrainConfig, ranks: Ranks, device: torch.device
) -> ByPart:
    """Mean loss over the targets of the same sequences, whatever the number of ranks [nats per token]."""
    every = validation_windows(sequences, config)
    parts = sequences.by_part(every[list(even_share(ranks.rank, ranks.world_size, len(every)))])
    model.eval()
    loss_sums = torch.zeros(len(parts), dtype=torch.float64, device=device)
    batch_size, tokens = config.batch_sizes(ranks.world_size)[ranks.rank], [0.0] * len(parts)
    for part, chosen in enumerate(parts.values()):
        for first in range(0, len(chosen), batch_size):
            batch = sequences.batch(chosen[first : first + batch_size])
            inputs, targets = to_device(batch, device)
            tokens[part] += targets.numel()
            with autocast(config, device):
                loss_sums[part] += model.loss_sum(inputs, targets)
    model.train()
    totals = ranks.total([*loss_sums.tolist(), *tokens])
    losses, counted = totals[: len(parts)], totals[len(parts) :]
    return ByPart.ratio(*(dict(zip(parts, sums, strict=True)) for sums in (losses, counted)))
