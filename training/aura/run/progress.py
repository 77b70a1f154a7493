"""How far a run has come, what one step was, and who is told of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from aura.config import TrainConfig
from aura.corpus.sequences import ByPart
from aura.strategy.interface import GlobalStepStats
from aura.texts import console


@dataclass
class Progress:
    """Part of every checkpoint. Losses are nats per token."""

    step: int = 0
    windows_seen: int = 0  # the position in the data
    tokens_seen: int = 0
    epoch_loss_sum: float = 0.0  # of the epoch that is under way
    epoch_tokens: float = 0.0
    epoch_seconds: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    validation_parts: dict[str, float] = field(default_factory=dict)  # that of every part of a mixture
    validated_step: int = -1
    first_validation_loss: float | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Progress:
        """Of a checkpoint, by a later release too, which may know more."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in known})

    def shift(self, config: TrainConfig, per_step: int) -> int:
        """How many steps more than were done the sequences seen are, in steps of `per_step`: 0 but where steps were of
        another size. A run that has its length in tokens or epochs follows its schedule by them."""
        return self.windows_seen // per_step - self.step if config.tokens or config.epochs else 0

    def saved(self) -> dict[str, Any]:
        """Without what a release from before mixtures refuses, where there is none."""
        return {name: value for name, value in asdict(self).items() if value != {}}

    def bits_per_byte(self, factors: ByPart) -> ByPart:
        """At the last validation; factors: for one nat per token."""
        assert self.validation_loss is not None
        return ByPart(self.validation_loss, self.validation_parts).times(factors)

    def bits_shown(self, factors: ByPart) -> str:
        bits = self.bits_per_byte(factors)
        return console.bits_per_byte(bits.whole, bits.parts)


@dataclass
class Step:
    """A step of all ranks that is done. What observers find out, those after them may read."""

    number: int  # from 1
    epoch: int  # from 1
    outcome: GlobalStepStats
    lr: float
    tokens: int  # that were read; those of `outcome` were learnt
    seconds: float
    is_first: bool  # of this attempt
    is_last: bool  # of the run
    ends_epoch: bool
    is_logged: bool
    is_saved: bool  # a checkpoint follows
    waited: float  # seconds of it, for other ranks and the wire
    loss_scales: tuple[float, float] | None  # before and after, where fp16 has left the step out
    # Found out by observers
    sync: str = "-"  # OK where the ranks have compared their parameters
    tokens_per_second: float | None = None
    validation_loss: float | None = None


class Observer:
    """Every rank has the same ones in the same order: they may talk to the other ranks."""

    def begin(self) -> None:
        """Before the first step of an attempt."""

    def after(self, step: Step) -> None:
        """A step is part of the run."""

    def end(self) -> None:
        """After the last step of an attempt, where nothing has gone wrong."""
