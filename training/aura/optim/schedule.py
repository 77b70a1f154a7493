"""The learning rate of every step."""

from __future__ import annotations

import math

from aura.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then the schedule down to min_lr_ratio. `step` counts from 0.

    cosine: half a period. wsd (warm-up, stable, decay: Hu et al. 2024, MiniCPM): constant, then linear.
    """
    warmup, floor = warmup_steps(config), config.min_lr_ratio
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "wsd":
        decay = max(1, round(config.steps * config.decay_ratio))
        return config.lr * (floor + (1 - floor) * min(1.0, max(0.0, (config.steps - step) / decay)))
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def warmup_steps(config: TrainConfig) -> int:
    return config.warmup_steps or round(config.steps * config.warmup_ratio)
