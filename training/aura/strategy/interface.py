"""What the loop says to a strategy and hears from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from aura.strategy.state import Allocate

STOP, SUSPECT = 1, 1 << 20  # added up over the ranks, of which there are fewer


@dataclass(frozen=True)
class LocalStepStats:
    """Of this rank's share of a step."""

    loss_sum: Tensor | float  # nats, summed over the tokens
    tokens: int
    stop: int = 0  # STOP: this rank was asked to stop; SUSPECT: because it cannot trust its numbers
    loss_scale: float = 1.0  # fp16: what the losses were multiplied with before the backward passes
    looked_at: bool = True  # something may look at the parameters behind this step; the same on every rank


@dataclass(frozen=True)
class GlobalStepStats:
    """Of a step of all ranks; the same on every rank."""

    loss_sum: float  # nats
    tokens: int
    gradient_norm: float  # L2, of the mean over all tokens, before clipping
    stopping: bool  # a rank was asked to stop: no step follows in this attempt
    suspect: bool  # because its GPU is unhealthy: what it has computed may be wrong
    bad_loss: list[int]  # the ranks whose loss is not finite
    # The ranks whose gradient is not finite; empty too when only the sum over all is not.
    bad_gradient: list[int]
    left_out: bool  # something was not finite: parameters and optimizer are as before

    @property
    def loss(self) -> float:
        """nats per token"""
        return self.loss_sum / self.tokens


class Strategy:
    is_whole = True  # behind the last step, parameters are the same on all ranks

    def start(self) -> None:
        """Make the parameters of all ranks equal."""

    def begin_step(self) -> None:
        """Before the first forward pass of a step: the gradients are zero."""
        raise NotImplementedError

    def last_backward(self) -> AbstractContextManager[None]:
        """Around the backward pass of the last micro-batch: gradients may leave while it computes."""
        raise NotImplementedError

    def apply(self, local_stats: LocalStepStats, lr: float) -> Callable[[], GlobalStepStats]:
        """From the gradients of the summed losses of all ranks to new parameters. What it returns waits until it is
        known what came of it; with a delay, micro-batches of the next step may be computed before it is called, with
        all but the last of their backward passes over, and after it there is `apply_update`."""
        raise NotImplementedError

    def apply_update(self, kept: bool) -> None:
        """With a delay: the parameters are those after the step that has been applied, from here on. kept:
        `full_state_dict` will be asked for at this step."""

    def complete(self) -> None:
        """Wait until the parameters are those after the last step: before anything but a forward pass reads them."""

    def expect_delay(self) -> None:
        """The next step may begin much later on some ranks: they have saved, validated or compiled."""

    def compare(self) -> list[int]:
        """The ranks whose parameters differ from those of the majority."""
        return []

    def full_state_dict(self, wanted: Allocate | None) -> Callable[[], dict[str, Tensor]]:
        """What returns the optimizer's state of all ranks together, as it is now, in the names and shapes of a rank
        that is alone. All ranks have to ask at the same step, and to call what they get, each in its own time: steps
        may go on meanwhile. It is copied into what `wanted` gives; None: it may return nothing. Raises OSError."""
        raise NotImplementedError

    def load(self, whole: dict[str, Tensor]) -> None:
        """The whole state, also of another number of ranks. Raises DataError."""
        raise NotImplementedError

    def close(self) -> None:
        """No exchange follows."""


def clip_factor(norm: float, clip: float, tokens: int) -> float:
    """What makes of a summed gradient its mean over `tokens`, no longer than `clip`; norm: of the mean."""
    return min(1.0, clip / norm) / tokens if norm else 1 / tokens


def global_stats_of(rows: list[list[float]]) -> GlobalStepStats:
    """rows: of every rank its loss, tokens, wish to stop, sum of squares of its owned gradient, and then of every rank
    whether its gradient is not finite, as this owner has seen it. Added in the order of the ranks, in fp64, so that
    every rank gets the same bits.
    """
    loss_sum, tokens, stops, squares = (sum(row[i] for row in rows) for i in range(4))
    bad_loss = [rank for rank, row in enumerate(rows) if not math.isfinite(row[0])]
    bad_gradient = [rank for rank in range(len(rows)) if any(row[4 + rank] for row in rows)]
    norm = math.sqrt(squares) / tokens if squares >= 0 else math.nan
    return GlobalStepStats(
        loss_sum=loss_sum,
        tokens=int(tokens),
        gradient_norm=norm,
        stopping=stops > 0,
        suspect=stops >= SUSPECT,
        bad_loss=bad_loss,
        bad_gradient=bad_gradient,
        left_out=bool(bad_loss or bad_gradient) or not math.isfinite(norm),
    )
