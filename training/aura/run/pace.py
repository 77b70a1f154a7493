"""How fast it goes, how much of the device that is, and when it will end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aura.cluster.activity import UNCOUNTED
from aura.config import TrainConfig
from aura.plan.flops import flops_per_token
from aura.plan.plan import Plan, compare
from aura.plan.replay import Replay
from aura.texts import console


@dataclass
class Pace:
    plan: Plan
    config: TrainConfig
    device: torch.device
    setting: Replay | None = None  # what strategy=auto has predicted by what it has measured
    steps: int = 0
    # Of the steps that count
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float) -> None:
        """One optimizer step of all ranks."""
        self.steps += 1
        if self.steps == UNCOUNTED + 1:
            self.seconds = self.tokens = 0.0
        self.seconds += seconds
        self.tokens += tokens

    def line(self, step: int) -> str:
        """The mean since the start; MFU (model FLOPs utilisation) against the peak of all devices together."""
        rate = self.tokens / self.seconds
        peak = self.plan.peak_flops_of_all if self.device.type != "cpu" else None
        work = flops_per_token(self.config, range(step - self._counted, step))
        mfu = rate * work / peak if peak else None
        return console.live(step, self.config.steps, rate, mfu, self.left(step))

    def left(self, step: int) -> float:
        """Seconds until the last step, at the mean since the start."""
        return (self.config.steps - step) * self._seconds_per_step

    def compared(self) -> str:
        """What was predicted, and what was measured."""
        on_gpu = self.device.type != "cpu"
        peak = torch.accelerator.max_memory_allocated(self.device) if on_gpu else None
        return compare(
            self.plan,
            self._seconds_per_step,
            peak,
            self._counted,
            self.steps > UNCOUNTED,
            self.setting.step_seconds if self.setting else None,
            self.setting.one_pc_seconds if self.setting else None,
        )

    @property
    def _counted(self) -> int:
        return self.steps - UNCOUNTED if self.steps > UNCOUNTED else self.steps

    @property
    def _seconds_per_step(self) -> float:
        return self.seconds / self._counted
