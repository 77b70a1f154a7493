"""The training loop of one rank: `Trainer.train` reads from top to bottom.

It knows neither how the ranks agree (aura/strategy/) nor who looks on (observers.py, saving.py). With a delay the
outcome of a step is known, and the step part of the run, after some micro-batches of the next one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.errors import DataError
from aura.model.forward import autocast
from aura.model.language_model import LanguageModel
from aura.optim.gradient_sum import GradientSum
from aura.optim.loss_scale import LossScale
from aura.optim.schedule import learning_rate
from aura.run.batches import Batches
from aura.run.memory_dry_run import run_memory_dry_run
from aura.run.meter import Meter
from aura.run.progress import Observer, Progress, Step
from aura.run.stop import StopSignal
from aura.strategy.interface import GlobalStepStats, LocalStepStats, Strategy
from aura.texts.console import text


class UnderWay(NamedTuple):
    """A step whose gradients are there."""

    wait: Callable[[], GlobalStepStats]
    lr: float


@dataclass
class Trainer:
    config: TrainConfig
    ranks: Ranks
    model: LanguageModel
    batches: Batches
    strategy: Strategy
    loss_scale: LossScale
    progress: Progress
    meter: Meter
    stop: StopSignal
    observers: Sequence[Observer]

    def __post_init__(self) -> None:
        self.activity = self.ranks.activity
        self.shift = self.progress.shift(self.config, self.batches.per_step)
        self.scheduled = replace(self.config, steps=self.config.steps + self.shift)
        self.under_way: UnderWay | None = None
        self.stopping = False
        self.started = 0.0  # the step, or what is left of it
        self.waited = 0.0  # before that, for other ranks
        self.first_step = self.progress.step + 1
        self.gradient_sum: GradientSum | None = None
        if self.config.parameter_format == "bf16" and self.batches.accumulates:
            self.gradient_sum = GradientSum(self.model, self.config.seed)

    def train(self) -> bool:
        """Until `config.steps`, or until a rank is asked to stop; True when the run is complete."""
        run_memory_dry_run(self.config, self.model, self.batches)
        for observer in self.observers:
            observer.begin()
        self.go_on()
        while not self.is_over:
            self.strategy.begin_step()
            loss_sum = self.forward_and_backward()
            if loss_sum is None:  # the step before has turned out to be the last one
                break
            number = self.progress.step + 1
            stop, scale = self.stop.weight, self.loss_scale.value
            told = LocalStepStats(loss_sum, self.batches.tokens, stop, scale, self.looked_at(number))
            lr = learning_rate(self.scheduled, self.progress.step + self.shift)
            self.under_way = UnderWay(self.strategy.apply(told, lr), lr)
            self.loss_scale.begin_next()
            if not self.batches.stale or number == self.config.steps:
                self.settle()
        for observer in self.observers:
            observer.end()
        self.strategy.close()
        return self.progress.step >= self.config.steps

    @property
    def is_over(self) -> bool:
        return self.stopping or self.progress.step >= self.config.steps

    def looked_at(self, number: int) -> bool:
        """Are the parameters behind that step (from 1) saved or validated, as the settings say?"""
        config = self.config
        often = number % config.save_every == 0 or number % config.validate_every == 0
        return often or self.ends_epoch or number == config.steps

    @property
    def ends_epoch(self) -> bool:
        """Does the step that comes next, or is under way, see the last sequences of an epoch?"""
        seen, sequences = self.progress.windows_seen, len(self.batches.sequences)
        return (seen + self.batches.per_step) // sequences > seen // sequences

    def go_on(self) -> None:
        self.activity.begin_step(self.progress.step + 1)
        self.started = time.perf_counter()
        self.waited = self.activity.waited

    def settle(self) -> None:
        """The step that is under way ends, and with it this rank's late micro-batches of the next one."""
        if self.under_way is None:
            self.strategy.apply_update(kept=False)
            return
        wait, lr, self.under_way = *self.under_way, None
        outcome = wait()
        seconds, waited = time.perf_counter() - self.started, self.activity.waited - self.waited
        self.activity.end_step()
        self.refuse_what_is_not_finite(outcome)
        step = self.commit(outcome, lr, seconds, waited)
        # Before delay_after the next step knows these weights from its beginning, after a resume too.
        self.strategy.apply_update(step.is_saved and self.batches.stale > 0)
        for observer in self.observers:
            observer.after(step)
        if step.is_first:
            leave_alone_what_is_there()
        self.stopping = outcome.stopping
        if not self.is_over:
            self.go_on()

    def forward_and_backward(self) -> Tensor | None:
        """The gradients of this rank's sequences of the step; the sum of their losses, () in fp64 [nats]. None where
        no step shall follow the one that was under way."""
        device = self.batches.device
        ahead = 1 if self.under_way else 0
        windows_seen = self.progress.windows_seen + ahead * self.batches.per_step
        self.batches.begin_step(self.progress.step + ahead + 1)
        self.model.begin_step(self.progress.step + ahead + self.shift, self.scheduled.steps)
        self.meter.begin_step()
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        # Filled in by the device; copied there, it would be waited for.
        scale = torch.full((), self.loss_scale.value, device=device) if self.loss_scale.enabled else None
        if self.gradient_sum:
            self.gradient_sum.begin_step(windows_seen + self.batches.offset)
        for number, batch in enumerate(self.batches.of_step(windows_seen)):
            if number == self.batches.stale:
                with self.meter.paused():
                    self.settle()
                if self.is_over:
                    return None
            with autocast(self.config, device):
                loss = self.model.loss_sum(batch.inputs, batch.targets, scale)
            with self.strategy.last_backward() if batch.is_last else nullcontext():
                (loss if scale is None else loss * scale).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        self.meter.end_step()
        if number < self.batches.stale:  # all of them are late
            self.settle()
            if self.is_over:
                return None
        # While the device computes; the strategy will wait for it.
        self.batches.prepare(windows_seen + self.batches.per_step)
        return loss_sum

    def refuse_what_is_not_finite(self, outcome: GlobalStepStats) -> None:
        """Raises DataError, on all ranks alike; not where a lower loss scale may help (fp16): the step is left out."""
        if outcome.bad_loss:
            raise self._not_finite("loss_not_finite", self.ranks.name(outcome.bad_loss))
        if outcome.left_out and self.loss_scale.is_exhausted:
            guilty = self.ranks.name(outcome.bad_gradient) or text("the_sum_over_all")
            raise self._not_finite("gradient_not_finite", guilty)

    def commit(self, outcome: GlobalStepStats, lr: float, seconds: float, waited: float) -> Step:
        """The step is part of the run from here on."""
        config, progress, ends_epoch = self.config, self.progress, self.ends_epoch
        epoch, scale_before = progress.windows_seen // len(self.batches.sequences), self.loss_scale.next
        self.loss_scale.update(outcome.left_out)
        progress.step += 1
        progress.windows_seen += self.batches.per_step
        progress.tokens_seen += outcome.tokens
        progress.loss = outcome.loss
        progress.epoch_loss_sum += outcome.loss_sum
        progress.epoch_tokens += outcome.tokens
        progress.epoch_seconds += seconds
        is_first, is_last = progress.step == self.first_step, progress.step == config.steps
        return Step(
            number=progress.step,
            epoch=epoch + 1,
            outcome=outcome,
            lr=lr,
            tokens=self.batches.per_step * config.seq_len,
            seconds=seconds,
            is_first=is_first,
            is_last=is_last,
            ends_epoch=ends_epoch,
            is_logged=progress.step % config.log_every == 0 or is_first or is_last or outcome.stopping,
            is_saved=progress.step % config.save_every == 0 or is_last or outcome.stopping,
            waited=waited,
            loss_scales=(scale_before, self.loss_scale.next) if outcome.left_out else None,
        )

    def _not_finite(self, key: str, where: str) -> DataError:
        return DataError(key, step=self.progress.step + 1, where=where)


def leave_alone_what_is_there() -> None:
    """What lives after the first step lives as long as the run. To search all of it for garbage takes tenths of a
    second, and all ranks wait."""
    gc.collect()
    gc.freeze()
