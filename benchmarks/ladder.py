"""The ladder of `make bench-learning ARMS=ladder`: how what few bits and a delay cost changes with a model's size and
with the length of its run. What a straight line over the logarithms of both says far beyond them is a guess, and how
far that is stands beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from learning_arms import ARMS_OF_LADDER
from measuring import Row, interval, show

MEDIUM, ITS_STEPS = 354_823_168, 19_000  # gpt2-medium, and ten billion tokens at half a million a step


@dataclass(frozen=True)
class Rung:
    """Models of one size, trained for so many steps."""

    size: str
    parameters: int
    steps: int
    lr: float
    loss: float  # of the synchronous arm, mean of the seeds
    costs: dict[str, list[float]]  # of every arm and seed: how much more loss [nats per token]

    def cells(self) -> list[str]:
        words = [self.size, str(self.steps), f"{self.lr:g}", f"{self.loss:.4f}"]
        for costs in self.costs.values():
            low, high = interval(costs)
            words.append(f"{statistics.mean(costs):+.4f} ± {(high - low) / 2:.4f}")
        return words

    def summary(self) -> Row:
        upper = {arm: interval(costs)[1] for arm, costs in self.costs.items()}
        about = {"parameters": self.parameters, "steps": self.steps, "lr": self.lr, "loss": self.loss}
        return {**about, "costs": self.costs, "upper_95": upper}


@dataclass(frozen=True)
class Trend:
    """cost = scale · parameters^by_size · steps^by_length, by least squares over the logarithms of the means."""

    scale: float
    by_size: float
    by_length: float

    def at(self, parameters: float, steps: float) -> float:
        return self.scale * parameters**self.by_size * steps**self.by_length


def trend(rungs: Sequence[Rung], arm: str) -> Trend | None:
    """None where an arm costs nothing on one of the rungs, or where they do not differ in both."""
    means = [statistics.mean(rung.costs[arm]) for rung in rungs]
    rows = [(1.0, math.log(rung.parameters), math.log(rung.steps)) for rung in rungs]
    if min(means) <= 0 or np.linalg.matrix_rank(rows) < 3:
        return None
    (scale, by_size, by_length), *_ = np.linalg.lstsq(np.array(rows), np.log(means), rcond=None)
    return Trend(math.exp(scale), float(by_size), float(by_length))


def show_ladder(rungs: Sequence[Rung], seeds: int) -> None:
    title = f"What an arm costs beside the synchronous one, nats per token, 95 %; Muon, {seeds} seeds"
    show(
        title,
        ("size", "steps", "lr", "loss", *ARMS_OF_LADDER),
        [rung.cells() for rung in rungs],
        left=("size",),
    )
    for arm in ARMS_OF_LADDER:
        if line := trend(rungs, arm):
            far = MEDIUM / max(rung.parameters for rung in rungs)
            print(
                f"{arm}: twice the parameters make the cost {2**line.by_size:.2f} times as large, twice the steps "
                f"{2**line.by_length:.2f} times. On that line gpt2-medium, {far:.0f} times larger than the largest "
                f"model here, loses {line.at(MEDIUM, ITS_STEPS):+.4f} in {ITS_STEPS} steps."
            )
