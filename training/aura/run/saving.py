"""When checkpoints are written, what they say of the run, and the mark of its end."""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aura.checkpoint import store
from aura.checkpoint.manifest import Writer, described
from aura.cluster.ranks import CollectiveFailed, Ranks
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.corpus.sequences import ByPart
from aura.errors import ConfigError, NoRoom, waiting_mends, why_not_written
from aura.model.language_model import LanguageModel
from aura.optim.loss_scale import LossScale
from aura.plan.memory import checkpoint_bytes, save_bytes
from aura.run import directory, memory_copy
from aura.run.division import Division
from aura.run.memory_copy import MemoryCopy
from aura.run.observers import ReplicaCheck
from aura.run.pace import Pace
from aura.run.progress import Observer, Progress, Step
from aura.run.runlog import RunLog
from aura.run.status import Status
from aura.run.stop import StopSignal
from aura.run.tensorboard_logger import TensorBoardLogger
from aura.strategy.checksum import checksum
from aura.strategy.interface import Strategy
from aura.strategy.state import copies
from aura.texts import console
from aura.texts.console import Console

LOOK = 5.0  # seconds between two looks whether there is room for what no rank had room for
# Seconds until it is tried again whatever the disk says: a file server says nothing of quotas. Trying takes all
# ranks, and the wire.
TRY = 60.0


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint says of the run: state.json."""

    config: TrainConfig
    corpus: Corpus
    ranks: Ranks
    writer: Writer  # this attempt
    model: LanguageModel
    progress: Progress
    loss_scale: LossScale
    division: Division
    log: RunLog

    def state(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "step": progress.step,
            **described(self.writer),
            "progress": progress.saved(),
            "scaler": self.loss_scale.state(),
            "division": self.division.state(progress.step),
            "log": self.log.text,
            "config": asdict(self.config),
            "corpus": self.corpus.fingerprint,
            "world_size": self.ranks.world_size,
            "parameters_checksum": f"{checksum(self.model.parameters()) & (2**64 - 1):016x}",
            # Of these very parameters: rotation keeps the best.
            "validation_loss": progress.validation_loss if progress.validated_step == progress.step else None,
        }


@dataclass
class Saving(Observer):
    """A checkpoint every `save_every` steps, at the end, and when a rank is asked to stop."""

    saver: store.Saver
    saves: bool  # this rank writes them
    snapshot: Snapshot
    strategy: Strategy
    comparison: ReplicaCheck
    board: TensorBoardLogger
    stop: StopSignal
    speaker: Console
    status: Status
    copies: MemoryCopy | None = None  # between two of them
    under_way: str = ""  # the name of a checkpoint
    told: Exception | None = None  # the last that was said
    in_memory: bool = False  # that one is a copy there
    size: int = 0  # of one, in bytes
    began: float = 0.0  # when
    stall: float = 0.0  # seconds that training waited for it
    # Seconds after `began` in which a rank may still be writing it: a guess until the first one has been written.
    writing: float = 60.0

    def after(self, step: Step) -> None:
        if self._may_be_written():
            self.strategy.expect_delay()
        if not step.is_saved:
            if not self._saver.is_writing:
                self._say_what_failed()
            if self.copies and self.copies.is_due(step.number, step.seconds, self.strategy.is_whole):
                self._copy(self.copies)
            return
        if step.outcome.suspect:
            self._save("suspect", wait=True)
            # The others hear from that rank which one it is, and why.
            raise self.stop.unhealthy or CollectiveFailed(console.text("another_is_suspect"))
        if step.outcome.stopping and not step.is_last:
            self._save("interrupt", wait=True)
        else:
            self.comparison.compare()
            self._save("checkpoint", wait=step.is_last)
            if self.copies and not step.is_last:
                self.copies.plan(step.number)

    def end(self) -> None:
        self._finish()

    def _save(self, kind: str, wait: bool) -> None:
        """wait: until it is on a disk. So it is also where the one before is on none: going on would risk ever more."""
        wait = not self._finish() or wait
        self._begin(kind)
        while wait and not self._finish() and kind != "suspect":
            self._wait_for_room()
            self._begin(kind)
        self.status.set(state="training", message="")

    def _copy(self, copies: MemoryCopy) -> None:
        if not self._finish():  # the checkpoint before is on no disk: that comes first
            self._save("checkpoint", wait=True)
        elif copies.fits(self._bytes(), self.saves):
            self._begin("checkpoint", in_memory=True)
            self.status.set(state="training", message="")
        else:
            self.speaker.say_once(console.text("no_room_for_copies", size=self._bytes() / 1e9))
            # The last one would only grow older, and take room where it is short.
            memory_copy.forget(copies.saver.directory)
            self.copies = None
            return
        copies.plan(self.snapshot.progress.step)

    def _bytes(self) -> int:
        """Of a checkpoint."""
        return checkpoint_bytes(self.snapshot.config, self.snapshot.ranks.world_size)

    @property
    def _saver(self) -> store.Saver:
        return self.copies.saver if self.copies and self.in_memory else self.saver

    def _begin(self, kind: str, in_memory: bool = False) -> None:
        snapshot, strategy, self.in_memory = self.snapshot, self.strategy, in_memory
        self.status.set(state="saving")
        self.under_way = f"{kind}-step-{snapshot.progress.step}"
        strategy.complete()
        strategy.expect_delay()
        self.began = time.monotonic()
        self.size = self._bytes()
        config, world_size = snapshot.config, snapshot.ranks.world_size
        copied = save_bytes(config, world_size)
        allocate = store.room_for(copied, self._saver.directory)
        if self.saves and not store.has_room(copied):
            self.size += copied  # they lie beside the checkpoint until it is written
        try:
            if self.saves:
                parameters = copies(store.parameters_of(snapshot.model), allocate)
            collect = strategy.full_state_dict(allocate if self.saves else None)
        except OSError as error:  # no room for the copies: the others need this rank's part
            without_frames = error.with_traceback(None)  # they hold the copies that there was room for
            self._saver.help(self.under_way, strategy.full_state_dict(None), without_frames)
        else:
            if self.saves:
                self._saver.begin(self.under_way, parameters, collect, snapshot.state())
            else:
                self._saver.help(self.under_way, collect)
        self.stall = time.monotonic() - self.began

    def _wait_for_room(self) -> None:
        """Until a rank may be able to save. Raises NoRoom where one is asked to stop meanwhile, and ConfigError where
        no rank ever will be."""
        step = self.snapshot.progress.step
        self._refuse_to_wait_in_vain(step)
        sentence = console.text("waits_for_room", step=step, size=self.size / 1e9, path=self.saver.directory)
        self.speaker.say(sentence)
        self.status.set(message=sentence)
        began = time.monotonic()
        while True:
            time.sleep(LOOK)
            tries = time.monotonic() - began > TRY
            may_fit = self.saves and (self._has_room() or tries)
            # Not for a rank that is back: it can wait for room too, or it has some.
            asked = [float(self.stop.requested or self.stop.unhealthy is not None), float(may_fit)]
            stopping, somewhere = self.snapshot.ranks.total(asked)
            if stopping:
                raise NoRoom("stopped_without_room", step=step)
            if somewhere:
                return

    def _refuse_to_wait_in_vain(self, step: int) -> None:
        """Raises ConfigError, on all ranks alike, where of each that saves a person has to mend something."""
        error, ranks = self.saver.error, self.snapshot.ranks
        own: dict[str, Any] = {"may_save": self.saves and waiting_mends(error), "why": ""}
        if self.saves and error:
            own["why"] = f"{self.saver.directory} ({ranks.name([ranks.rank])}): {why_not_written(error)}"
        told = ranks.all_of(own)
        if not any(one["may_save"] for one in told):
            where = "; ".join(one["why"] for one in told if one["why"])
            raise ConfigError("saved_nowhere", step=step, where=where)

    def _has_room(self) -> bool:
        error = self.saver.error
        try:
            free = shutil.disk_usage(self.saver.directory).free
        except OSError:
            return False
        return isinstance(error, OSError) and error.errno == errno.ENOSPC and free > self.size

    def _may_be_written(self) -> bool:
        """A disk that is busy with a checkpoint keeps whatever else its rank writes waiting, and so all ranks."""
        ends = self.began + self.writing
        return bool(self.under_way) and (self._saver.is_writing or time.monotonic() < ends)

    def _finish(self) -> bool:
        """Wait for the save that is under way; False where it is on no disk. One node without space does not hold up a
        run that others have saved."""
        saver, name = self._saver, self.under_way
        if not name:
            return True
        saved = saver.wait() and self.saves
        if isinstance(saver.error, CollectiveFailed):
            raise saver.error
        self._say_what_failed()
        saves, seconds, stall = self.snapshot.ranks.total([float(saved), saver.seconds, self.stall])
        self.writing = 2 * seconds  # of all ranks together, so more than that of the slowest
        if self.in_memory and self.copies:
            self.copies.cost(stall, seconds)
            self.under_way, self.in_memory = "", False
            return True
        if saved and self.speaker.leads:
            self.speaker.say(console.text("saved", name=name, stall=self.stall, seconds=saver.seconds))
            self.board.add("Time/save_stall_seconds", self.stall, self.snapshot.progress.step)
        self.under_way = ""
        return saves > 0

    def _say_what_failed(self) -> None:
        """At once, and not when the next one is due."""
        error, path = self._saver.error, self._saver.directory / self.under_way
        if not self.under_way or not self.saves or isinstance(error, CollectiveFailed):
            return
        if error and error is not self.told:
            self.told = error
            self.speaker.say(console.text("checkpoint_not_written", path=path, error=why_not_written(error)))


@dataclass
class Completion(Observer):
    """What is said and written when a run has all of its steps. The last observer: everything else is done."""

    directory: Path
    asked: TrainConfig  # with strategy=auto where that was asked for
    saves: bool
    snapshot: Snapshot
    comparison: ReplicaCheck
    pace: Pace
    bits: ByPart  # per byte, for one nat per token
    speaker: Console
    status: Status

    def begin(self) -> None:
        self.status.set(state="training", step=self.snapshot.progress.step)

    def end(self) -> None:
        progress, corpus = self.snapshot.progress, self.snapshot.corpus
        if progress.step < self.snapshot.config.steps:
            return
        if self.speaker.leads:
            assert progress.first_validation_loss is not None and progress.validation_loss is not None
            start, end = progress.first_validation_loss, progress.validation_loss
            bits = progress.bits_shown(self.bits)
            losses = {"end": end, "bits": bits, "start": start, "unigram": corpus.unigram_entropy}
            self.speaker.say(console.text("validation_at_end", **losses))
            self.speaker.say(outcome := self.pace.compared())
            self.status.set(outcome=outcome)
        self.status.set(sync=self.comparison.compare())
        if self.saves:
            with directory.without_stopping(self.directory, self.speaker.say):
                directory.write_done(self.directory, self.asked, corpus, self.snapshot.state())
