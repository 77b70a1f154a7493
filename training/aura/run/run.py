"""What one rank knows of the run that it takes part in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from aura.checkpoint.manifest import Writer
from aura.checkpoint.store import Saver
from aura.cluster.activity import Activity
from aura.cluster.place import Place
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.plan.gpus import Gpu
from aura.plan.replay import Replay
from aura.run.status import Status
from aura.run.stop import StopSignal
from aura.texts.console import Console


@dataclass(frozen=True)
class Run:
    config: TrainConfig
    asked: TrainConfig  # the same, with strategy=auto where that was asked for
    corpus: Corpus
    directory: Path
    shares_from: Path | None  # a record of decisions (balance.py) to take in place of measuring
    log_dir: Path  # TensorBoard's
    place: Place
    device: torch.device
    ranks: Ranks
    devices: list[Gpu]  # of every rank
    speaker: Console
    status: Status
    stop: StopSignal
    saver: Saver
    writer: Writer  # of its checkpoints: this attempt
    activity: Activity  # what the heartbeat says of this rank
    setting: Replay | None = None  # what strategy=auto has decided

    @property
    def leads(self) -> bool:
        """One rank speaks for all."""
        return self.place.rank == 0

    @property
    def saves(self) -> bool:
        """The ranks of one node share a disk."""
        return self.place.local_rank == 0

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def say(self, line: str) -> None:
        self.speaker.say(line)
