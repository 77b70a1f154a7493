"""Who is told of every step: comparison, lines, validation, curves, log, epochs. Saving is in saving.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.corpus.sequences import ByPart
from aura.errors import DataError
from aura.run.batches import Batches
from aura.run.pace import Pace
from aura.run.progress import Observer, Progress, Step
from aura.run.runlog import Row, RunLog
from aura.run.status import Status
from aura.run.tensorboard_logger import TensorBoardLogger
from aura.strategy.interface import Strategy
from aura.texts.console import Console, text


@dataclass
class ReplicaCheck(Observer):
    """Are the parameters of all ranks bit-equal?"""

    ranks: Ranks
    strategy: Strategy
    progress: Progress
    status: Status

    def begin(self) -> None:
        self.compare()

    def after(self, step: Step) -> None:
        if step.is_logged and self.strategy.is_whole:
            step.sync = self.compare()

    def compare(self) -> str:
        """'OK' when they are; '-' where there is nothing to compare. Raises DataError on all ranks alike."""
        if self.ranks.world_size == 1:
            return "-"
        self.strategy.complete()
        if odd := self.strategy.compare():
            self.status.set(sync="FAILED")
            raise DataError("sync_failed", step=self.progress.step, ranks=self.ranks.name(odd))
        return "OK"


@dataclass
class ConsoleLogger(Observer):
    """What a person reads meanwhile: on the console, and in status.json."""

    pace: Pace
    speaker: Console
    status: Status
    # Since the last logged step
    seconds: float = 0.0
    tokens: float = 0.0
    waited: float = 0.0

    def after(self, step: Step) -> None:
        if step.loss_scales:
            before, now = step.loss_scales
            self.speaker.say_once(text("left_out", step=step.number, before=before, now=now))
        loss, tokens = step.outcome.loss, step.tokens
        self.pace.add(step.seconds, tokens)
        self.seconds, self.tokens = self.seconds + step.seconds, self.tokens + tokens
        self.waited += step.waited
        if self.speaker.is_live:
            self.speaker.show(self.pace.line(step.number))
        if step.is_logged:
            step.tokens_per_second = round(self.tokens / self.seconds, 1)
            self.status.set(
                sync=step.sync,
                tokens_per_second=step.tokens_per_second,
                eta=round(self.pace.left(step.number), 1),
                waited=round(self.waited, 3),
            )
            self.seconds = self.tokens = self.waited = 0.0
            shown = {"epoch": step.epoch, "number": step.number, "loss": loss, "sync": step.sync}
            self.speaker.say(text("step", **shown))
            self.speaker.say_once(self.pace.line(step.number))
        self.status.set(at_once=step.is_first, step=step.number, epoch=step.epoch, loss=loss)


@dataclass
class Validation(Observer):
    """The loss on text that is not trained on: before the first step, now and then, and at the end of each epoch."""

    config: TrainConfig
    losses: Callable[[], ByPart]  # which all ranks compute together
    bits: ByPart  # per byte, for one nat per token
    strategy: Strategy
    progress: Progress
    speaker: Console
    status: Status

    def begin(self) -> None:
        if self.progress.first_validation_loss is None:
            self.progress.first_validation_loss = loss = self._validate()
            bits = self.progress.bits_shown(self.bits)
            guessing = {"vocab_size": self.config.vocab_size, "uniform": math.log(self.config.vocab_size)}
            self.speaker.say_once(text("validation_at_start", loss=loss, bits=bits, **guessing))

    def after(self, step: Step) -> None:
        if step.number % self.config.validate_every == 0 or step.ends_epoch or step.is_last:
            step.validation_loss = self._validate()

    def _validate(self) -> float:
        self.status.set(message=text("validating"))
        self.strategy.complete()
        self.strategy.expect_delay()
        losses, progress = self.losses(), self.progress
        progress.validation_loss, progress.validation_parts = losses.whole, losses.parts
        progress.validated_step = progress.step
        bits = progress.bits_per_byte(self.bits)
        self.status.set(
            message="",
            validation_loss=losses.whole,
            bits_per_byte=bits.whole,
            bits_per_byte_of_parts={part: round(value, 4) for part, value in bits.parts.items()},
        )
        return losses.whole


@dataclass
class Curves(Observer):
    """TensorBoard's."""

    board: TensorBoardLogger
    bits: ByPart  # per byte, for one nat per token
    progress: Progress
    device: torch.device
    missed: list[Row]  # while this node was away

    def begin(self) -> None:
        for row in self.missed:
            if row.loss is not None:
                self.board.add("Loss/train_step", row.loss, row.step)
            if row.validation_loss is not None and row.bits_per_byte is not None:
                self._add(row.step, row.validation_loss, ByPart(row.bits_per_byte, row.bits_of_parts))
        loss = self.progress.validation_loss
        if loss is not None and self.progress.validated_step == self.progress.step == 0:
            self._add(0, loss, self.progress.bits_per_byte(self.bits))

    def after(self, step: Step) -> None:
        self.board.add("Loss/train_step", step.outcome.loss, step.number)
        if step.is_logged:
            self.board.add_system(step.number, self.device)
        if step.validation_loss is not None:
            self._add(step.number, step.validation_loss, self.progress.bits_per_byte(self.bits))
        if step.is_logged or step.validation_loss is not None:  # there will be a row
            self.board.flush()

    def _add(self, step: int, loss: float, bits: ByPart) -> None:
        self.board.add("Loss/validation", loss, step)
        self.board.add("Loss/validation_bits_per_byte", bits.whole, step)
        for part, value in bits.parts.items():
            self.board.add(f"Loss/validation_bits_per_byte/{part}", value, step)

    def end(self) -> None:
        self.board.close()


@dataclass
class Log(Observer):
    """training_log.csv: a row per logged or validated step."""

    log: RunLog
    bits: ByPart  # per byte, for one nat per token
    progress: Progress

    def after(self, step: Step) -> None:
        if not step.is_logged and step.validation_loss is None:
            return
        bits = None if step.validation_loss is None else self.progress.bits_per_byte(self.bits)
        self.log.add(
            Row(
                step=step.number,
                epoch=step.epoch,
                tokens_seen=self.progress.tokens_seen,
                loss=step.outcome.loss,
                validation_loss=step.validation_loss,
                lr=step.lr,
                gradient_norm=step.outcome.gradient_norm,
                tokens_per_second=step.tokens_per_second,
                seconds=round(self.progress.epoch_seconds, 3),
                bits_per_byte=bits.whole if bits else None,
                bits_of_parts=bits.parts if bits else {},
            )
        )

    def end(self) -> None:
        self.log.close()


class Epochs(Observer):
    """Sums up an epoch and begins the next. The last one may be cut short by the end of the run."""

    def __init__(
        self,
        steps: int,
        batches: Batches,
        progress: Progress,
        board: TensorBoardLogger,
        speaker: Console,
        bits: ByPart,
    ) -> None:
        self.progress, self.board, self.speaker = progress, board, speaker
        self.bits = bits  # per byte, for one nat per token
        before_last = progress.windows_seen + (steps - progress.step - 1) * batches.per_step
        # What the last step takes of one more epoch, to be a whole step, is not announced.
        self.count = before_last // len(batches.sequences) + 1

    def after(self, step: Step) -> None:
        if not (step.ends_epoch or step.is_last):
            return
        progress = self.progress
        assert step.validation_loss is not None
        loss, seconds = progress.epoch_loss_sum / progress.epoch_tokens, progress.epoch_seconds
        numbers = {"number": step.epoch, "epochs": self.count, "seconds": seconds}
        losses = {"train": loss, "validation": step.validation_loss}
        line = text("epoch", **numbers, **losses)
        if self.bits.parts:
            line += f" | {progress.bits_shown(self.bits)}"
        self.speaker.say_once(line)
        self.board.add_epoch(step.epoch, loss, step.validation_loss, seconds)
        if step.ends_epoch:  # else more steps may be asked for
            progress.epoch_loss_sum = progress.epoch_tokens = progress.epoch_seconds = 0.0
