"""What is decided before torch starts: the GPU of a single process, and what `--preset auto` is on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from aura import gpus
from aura.config import AUTO, TrainConfig, resolve
from aura.errors import ConfigError
from aura.memory import GIB, largest_micro_batch, memory_of

# The largest model first, and of one model the fastest recipe first.
CANDIDATES = (
    "aura-72h-max",
    "aura-72h-extended",
    "gpt2-medium",
    "gpt2-medium-10gb",
    "gpt2-medium-6gb",
    "gpt2-medium-4gb",
)
WITHOUT_GPU = "gpt2-nano"
ANOTHER_WAY = "Another one: CUDA_VISIBLE_DEVICES=N. All of them: aura launch-local."
USABLE = 0.95  # of what is free: torch's allocator leaves gaps


def resolve_here(preset: str, overrides: Mapping[str, Any]) -> TrainConfig:
    """`resolve`, and for `auto` the choice for this machine, printed with its reason. Raises ConfigError.

    One of several ranks must not choose: another one may have another GPU. `resolve` refuses it.
    """
    if preset == AUTO and _alone():
        preset, reason = choose(gpus.of_this_machine(), overrides)
        print(reason, flush=True)
    return resolve(preset, overrides)


def take_best_gpu() -> None:
    """A process that is alone on a machine with several GPUs sees only the one with most free memory.

    Ranks of a gang are left alone: each has its own by LOCAL_RANK.
    """
    if not _alone():
        return
    try:
        found = gpus.of_this_machine()
    except ConfigError:  # torch may know more than nvidia-smi; if not, it says so
        return
    if len(found) > 1:
        best = max(found, key=lambda gpu: gpu.free)
        os.environ["CUDA_VISIBLE_DEVICES"] = best.uuid
        print(f"{best.name}: of {len(found)} GPUs the one with most free memory. {ANOTHER_WAY}", flush=True)


def choose(found: list[gpus.Found], overrides: Mapping[str, Any]) -> tuple[str, str]:
    """The name of a preset that fits, with these overrides, the GPU with most free memory; and a sentence why."""
    if not found:
        return WITHOUT_GPU, f"preset=auto: {WITHOUT_GPU}, because this machine has no GPU."
    best = max(found, key=lambda gpu: gpu.free)
    has = f"{best.name} has {best.free / GIB:.1f} GiB free"
    too_large = ""
    for name in CANDIDATES:
        config = resolve(name, overrides)
        needs = memory_of(config, largest_micro_batch(config), on_gpu=True).total
        if needs <= USABLE * best.free:
            return name, f"preset=auto: {name}, because it needs {needs / GIB:.1f} GiB and {has}{too_large}."
        too_large = f"; {name} would need {needs / GIB:.1f} GiB"
    return WITHOUT_GPU, f"preset=auto: {WITHOUT_GPU}, because {has}{too_large}."


def _alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"
