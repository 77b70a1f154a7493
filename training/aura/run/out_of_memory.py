"""A step did not fit: what to do about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from aura.checkpoint import store
from aura.cluster.dist_env import DistEnv
from aura.config import TrainConfig
from aura.plan import gpus
from aura.plan.memory import largest_micro_batch, memory_of, settings_that_fit
from aura.plan.micro_batch import auto_micro_batch
from aura.texts import console

NO_SPARE = "no_spare"  # in a rank's directory: its GPU had not the room that micro_batch=auto took


def gpu_of(device: torch.device, own: Path) -> gpus.Gpu:
    """own: the rank's directory."""
    if device.type == "cpu":
        return gpus.cpu()
    properties = torch.cuda.get_device_properties(device)
    found = gpus.called(properties.name, properties.total_memory)
    return replace(found, has_spare=not (own / NO_SPARE).exists())


def asks_for_less(error: Exception, config: TrainConfig, ranks: int, device: torch.device, own: Path) -> bool:
    """Has micro_batch=auto taken more than is there? From the next attempt on the rank computes batch_size. config: of
    the ranks that take part."""
    if not isinstance(error, torch.OutOfMemoryError) or not auto_micro_batch(
        config, [gpu_of(device, own)] * ranks
    ):
        return False
    try:
        (own / NO_SPARE).touch()
    except OSError:  # and the next attempt would end in the same way
        return False
    return True


def is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    )


def out_of_memory(config: TrainConfig, place: DistEnv, device: torch.device, own: Path) -> str:
    """What to do about it: the least harmful changes with which the same step fits, by the plan's memory model."""
    size, on_gpu = config.batch_sizes(place.world_size)[place.rank], device.type != "cpu"
    room, ranks = gpu_of(device, own).memory, place.world_size
    needed = memory_of(config, largest_micro_batch(config), on_gpu, ranks).total
    batch = {"size": size, "seq_len": config.seq_len}
    what = console.text("out_of_memory", rank=place.rank, node=place.node, **batch)
    # The model has just been too hopeful, or somebody else uses the memory: leave more of it.
    has_bf16 = not on_gpu or torch.cuda.get_device_capability(device) >= gpus.FIRST_WITH_BF16
    keep = () if has_bf16 else ("precision",)
    changes = settings_that_fit(config, min(0.95 * room, 0.9 * needed), on_gpu, keep, ranks)
    if not changes:
        return console.text("nothing_fits", problem=what)
    smaller = replace(config, **changes)
    flags = " ".join(f"--{name.replace('_', '-')} {str(value).lower()}" for name, value in changes.items())
    now = memory_of(smaller, largest_micro_batch(smaller), on_gpu, ranks).total
    # What a run has begun with, it keeps.
    key = "fits_in_another_run" if any(name in store.FIXED for name in changes) else "fits_with"
    return console.text(key, problem=what, part=now / needed, flags=flags)
