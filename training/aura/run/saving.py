"""When checkpoints are written, what they say of the run, and the mark of its end."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import asdict
from typing import Any

from aura.checkpoint import store
from aura.cluster.ranks import CollectiveFailed
from aura.errors import DataError, reason_of
from aura.plan.memory import state_bytes
from aura.run import directory
from aura.run.board import Board
from aura.run.observers import Comparison
from aura.run.pace import Pace
from aura.run.progress import Step
from aura.run.trainer import Trainer
from aura.strategy.checksum import checksum
from aura.texts import console


def state_of(trainer: Trainer) -> dict[str, Any]:
    """state.json of a checkpoint."""
    run, progress = trainer.run, trainer.progress
    return {
        "step": progress.step,
        "writer": run.writer._asdict(),
        "progress": asdict(progress),
        "scaler": trainer.loss_scale.state(),
        "division": trainer.batches.division.state(progress.step),
        "config": asdict(run.config),
        "corpus": run.corpus.fingerprint,
        "world_size": run.place.world_size,
        "parameters_checksum": f"{checksum(trainer.model.parameters()) & (2**64 - 1):016x}",
        # Of these very parameters: rotation keeps the best.
        "validation_loss": progress.validation_loss if progress.validated_step == progress.step else None,
    }


class Saving:
    """A checkpoint every `save_every` steps, at the end, and when a rank is asked to stop."""

    def __init__(self, trainer: Trainer, comparison: Comparison, board: Board) -> None:
        self.trainer, self.run = trainer, trainer.run
        self.comparison, self.board = comparison, board
        self.under_way = ""  # the name of a checkpoint
        self.began = 0.0  # when
        self.stall = 0.0  # seconds that training waited for it
        # Seconds after `began` in which a rank may still be writing it: a guess until the first one has been written.
        self.writing = 60.0

    def begin(self) -> None:
        pass

    def after(self, step: Step) -> None:
        if self._may_be_written():
            self.trainer.strategy.expect_delay()
        if not step.is_saved:
            return
        if step.suspect:
            self._save("suspect", wait=True)
            # The others hear from that rank which one it is, and why.
            raise self.run.stop.sick or CollectiveFailed(console.text("another_is_suspect"))
        if step.stopping and not step.is_last:
            self._save("interrupt", wait=True)
        else:
            self.comparison.compare()
            self._save("checkpoint", wait=step.is_last)

    def end(self) -> None:
        self._finish()

    def _save(self, kind: str, wait: bool) -> None:
        run, strategy = self.run, self.trainer.strategy
        self._finish()
        run.status.set(state="saving")
        self.under_way = f"{kind}-step-{self.trainer.progress.step}"
        strategy.complete()
        strategy.expect_delay()
        self.began = time.monotonic()
        optimizer = state_bytes(run.config, run.place.world_size)
        parameters = sum(parameter.nbytes for parameter in self.trainer.model.parameters())
        short = strategy.gathers and not store.has_room(optimizer)
        copied = store.has_room(optimizer + parameters)
        collect = strategy.whole_state(wanted=run.saves and not short, copied=copied)
        if run.saves and not short:
            run.saver.begin(self.under_way, self.trainer.model, collect, state_of(self.trainer), copied)
        else:
            error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) if run.saves else None
            run.saver.help(self.under_way, collect, error)
        self.stall = time.monotonic() - self.began
        if wait:
            self._finish()
        run.status.set(state="training")

    def _may_be_written(self) -> bool:
        """A disk that is busy with a checkpoint keeps whatever else its rank writes waiting, and so all ranks."""
        ends = self.began + self.writing
        return bool(self.under_way) and (self.run.saver.is_writing or time.monotonic() < ends)

    def _finish(self) -> None:
        """Wait for the save that is under way. One node without space does not end a run that others have saved."""
        run, saver, name = self.run, self.run.saver, self.under_way
        if not name:
            return
        saved = saver.wait() and run.saves
        if isinstance(saver.error, CollectiveFailed):
            raise saver.error
        if run.saves and saver.error:
            reason = reason_of(saver.error)
            run.say(console.text("checkpoint_not_written", path=run.checkpoints / name, error=reason))
        saves, seconds = run.ranks.total([float(saved), saver.seconds])
        self.writing = 2 * seconds  # of all ranks together, so more than that of the slowest
        if saves == 0:
            raise DataError("no_rank_saved", name=name)
        if saved and run.leads:
            run.say(console.saved(name, self.stall, saver.seconds))
            self.board.add("Time/save_stall_seconds", self.stall, self.trainer.progress.step)
        self.under_way = ""


class Completion:
    """What is said and written when a run has all of its steps. The last observer: everything else is done."""

    def __init__(self, trainer: Trainer, comparison: Comparison, pace: Pace) -> None:
        self.trainer, self.comparison, self.pace = trainer, comparison, pace

    def begin(self) -> None:
        pass

    def after(self, step: Step) -> None:
        pass

    def end(self) -> None:
        run, progress = self.trainer.run, self.trainer.progress
        if progress.step < run.config.steps:
            return
        if run.leads:
            assert progress.first_validation_loss is not None and progress.validation_loss is not None
            start, end = progress.first_validation_loss, progress.validation_loss
            run.say(console.validation_at_end(end, start, run.corpus.unigram_entropy))
            run.say(outcome := self.pace.compared())
            run.status.set(outcome=outcome)
        run.status.set(sync=self.comparison.compare())
        if run.saves:
            with directory.without_stopping(run.directory, run.say):
                directory.write_done(run.directory, run.asked, run.corpus, state_of(self.trainer))
