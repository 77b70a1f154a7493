"""Who is told of every step: comparison, lines, validation, curves, log, epochs. Saving is in saving.py."""

from __future__ import annotations

import math

from aura.corpus.windows import Windows
from aura.errors import DataError
from aura.model.forward import validation_loss
from aura.model.language_model import LanguageModel
from aura.run.batches import Batches
from aura.run.board import Board
from aura.run.pace import Pace
from aura.run.progress import Progress, Step
from aura.run.run import Run
from aura.run.runlog import Row, RunLog
from aura.strategy.interface import Strategy
from aura.texts import console


class Comparison:
    """Are the parameters of all ranks bit-equal?"""

    def __init__(self, run: Run, strategy: Strategy, progress: Progress) -> None:
        self.run, self.strategy, self.progress = run, strategy, progress

    def begin(self) -> None:
        self.compare()

    def after(self, step: Step) -> None:
        if step.is_logged:
            step.sync = self.compare()

    def end(self) -> None:
        pass

    def compare(self) -> str:
        """'OK' when they are; '-' where there is nothing to compare. Raises DataError on all ranks alike."""
        if self.run.place.world_size == 1:
            return "-"
        self.strategy.complete()
        if odd := self.strategy.compare():
            self.run.status.set(sync="FAILED")
            raise DataError("sync_failed", step=self.progress.step, ranks=self.run.ranks.name(odd))
        return "OK"


class Lines:
    """What a person reads meanwhile: on the console, and in status.json."""

    def __init__(self, run: Run, pace: Pace) -> None:
        self.run, self.pace = run, pace
        self.seconds = self.tokens = self.waited = 0.0  # since the last logged step

    def begin(self) -> None:
        pass

    def after(self, step: Step) -> None:
        run = self.run
        if step.loss_scales and run.leads:
            run.say(console.left_out(step.number, *step.loss_scales))
        self.pace.add(step.seconds, step.tokens)
        self.seconds, self.tokens = self.seconds + step.seconds, self.tokens + step.tokens
        self.waited += step.waited
        if run.speaker.is_live:
            run.speaker.show(self.pace.line(step.number))
        if step.is_logged:
            step.tokens_per_second = round(self.tokens / self.seconds, 1)
            run.status.set(
                sync=step.sync,
                tokens_per_second=step.tokens_per_second,
                eta=round(self.pace.left(step.number), 1),
                waited=round(self.waited, 3),
            )
            self.seconds = self.tokens = self.waited = 0.0
            run.say(console.step(step.epoch, step.number, step.loss, step.sync))
            if run.leads:
                run.say(self.pace.line(step.number))
        run.status.set(at_once=step.is_first, step=step.number, epoch=step.epoch, loss=step.loss)

    def end(self) -> None:
        pass


class Validation:
    """The loss on text that is not trained on: before the first step, now and then, and at the end of each epoch."""

    def __init__(self, run: Run, strategy: Strategy, model: LanguageModel, progress: Progress) -> None:
        self.run, self.strategy, self.model, self.progress = run, strategy, model, progress
        self.windows = Windows(run.corpus, "validation", run.config.seq_len)

    def begin(self) -> None:
        if self.progress.first_validation_loss is not None:
            return
        self.progress.first_validation_loss = loss = self._validate()
        if self.run.leads:
            vocab_size = self.run.config.vocab_size
            self.run.say(console.validation_at_start(loss, vocab_size, math.log(vocab_size)))

    def after(self, step: Step) -> None:
        if step.number % self.run.config.validate_every == 0 or step.ends_epoch or step.is_last:
            step.validation_loss = self._validate()

    def end(self) -> None:
        pass

    def _validate(self) -> float:
        run = self.run
        run.status.set(message=console.text("validating"))
        self.strategy.complete()
        self.strategy.expect_delay()
        loss = validation_loss(self.model, self.windows, run.config, run.ranks, run.device)
        run.status.set(message="", validation_loss=loss)
        self.progress.validation_loss, self.progress.validated_step = loss, self.progress.step
        return loss


class Curves:
    """TensorBoard's."""

    def __init__(self, run: Run, board: Board, progress: Progress) -> None:
        self.run, self.board, self.progress = run, board, progress

    def begin(self) -> None:
        if (
            self.progress.validation_loss is not None
            and self.progress.validated_step == self.progress.step == 0
        ):
            self.board.add("Loss/validation", self.progress.validation_loss, 0)

    def after(self, step: Step) -> None:
        self.board.add("Loss/train_step", step.loss, step.number)
        if step.is_logged:
            self.board.add_system(step.number, self.run.device)
        if step.validation_loss is not None:
            self.board.add("Loss/validation", step.validation_loss, step.number)

    def end(self) -> None:
        self.board.close()


class Log:
    """training_log.csv: a row per logged or validated step."""

    def __init__(self, log: RunLog, progress: Progress) -> None:
        self.log, self.progress = log, progress

    def begin(self) -> None:
        pass

    def after(self, step: Step) -> None:
        if not step.is_logged and step.validation_loss is None:
            return
        self.log.add(
            Row(
                step=step.number,
                epoch=step.epoch,
                tokens_seen=self.progress.tokens_seen,
                loss=step.loss,
                validation_loss=step.validation_loss,
                lr=step.lr,
                gradient_norm=step.gradient_norm,
                tokens_per_second=step.tokens_per_second,
                seconds=round(self.progress.epoch_seconds, 3) if step.is_logged else None,
            )
        )

    def end(self) -> None:
        self.log.close()


class Epochs:
    """Sums up an epoch and begins the next. The last one may be cut short by the end of the run."""

    def __init__(self, run: Run, batches: Batches, board: Board, progress: Progress) -> None:
        self.run, self.board, self.progress = run, board, progress
        before_last = progress.windows_seen + (run.config.steps - progress.step - 1) * batches.per_step
        # What the last step takes of one more epoch, to be a whole step, is not announced.
        self.count = before_last // len(batches.windows) + 1

    def begin(self) -> None:
        pass

    def after(self, step: Step) -> None:
        if not (step.ends_epoch or step.is_last):
            return
        progress = self.progress
        assert step.validation_loss is not None
        loss, seconds = progress.epoch_loss_sum / progress.epoch_tokens, progress.epoch_seconds
        if self.run.leads:
            self.run.say(console.epoch(step.epoch, self.count, loss, step.validation_loss, seconds))
        self.board.add_epoch(step.epoch, loss, step.validation_loss, seconds)
        progress.epoch_loss_sum = progress.epoch_tokens = progress.epoch_seconds = 0.0

    def end(self) -> None:
        pass
