"""How fast it goes, how much of the device that is, and when it will end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from aura.cluster.activity import UNCOUNTED
from aura.config import TrainConfig
from aura.plan.flops import flops_per_token
from aura.plan.plan import Plan, compare
from aura.run.setting import Chosen
from aura.texts import console

RECENT = 50  # steps


@dataclass
class Pace:
    plan: Plan
    config: TrainConfig
    device: torch.device
    setting: Chosen | None = None  # what strategy=auto has predicted by what it has measured
    steps: int = 0
    # Of the steps that count
    seconds: float = 0.0
    tokens: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # seconds of the last of them

    def add(self, seconds: float, tokens: float) -> None:
        """One optimizer step of all ranks."""
        self.steps += 1
        if self.steps == UNCOUNTED + 1:
            self.seconds = self.tokens = 0.0
            self.recent.clear()
        self.seconds += seconds
        self.recent.append(seconds)
        self.tokens += tokens

    def line(self, step: int) -> str:
        """The mean since the start; MFU (model FLOPs utilisation) against the peak of all devices together."""
        rate = self.tokens / self.seconds
        peak = self.plan.peak_flops_of_all if self.device.type != "cpu" else None
        work = flops_per_token(self.config, range(step - self._counted, step))
        mfu = rate * work / peak if peak else None
        return console.live(step, self.config.steps, rate, mfu, self.left(step))

    def left(self, step: int) -> float:
        """Seconds until the last step, at the mean of the last ones: a delay, say, begins in the middle of a run."""
        return (self.config.steps - step) * sum(self.recent) / len(self.recent)

    def compared(self) -> str:
        """What was predicted, and what was measured."""
        on_gpu = self.device.type != "cpu"
        peak = torch.accelerator.max_memory_allocated(self.device) if on_gpu else None
        return compare(
            self.plan,
            self.seconds / self._counted,
            peak,
            self._counted,
            self.steps > UNCOUNTED,
            self.setting.step_seconds if self.setting else None,
            self.setting.one_pc_seconds if self.setting else None,
        )

    @property
    def _counted(self) -> int:
        return self.steps - UNCOUNTED if self.steps > UNCOUNTED else self.steps
