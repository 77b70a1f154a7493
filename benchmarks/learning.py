"""`make bench-learning`: what fewer bits on the wire and a bounded delay cost in loss, on a very small model.

One process plays five ranks (five_ranks.py) on one pass over the lab's Spanish text. Every arm is compared with the
synchronous fp32 arm of the same optimizer and the same seed (initial weights and order of the text): the table gives
the mean of the differences and its 95 % interval (Student's t over the paired seeds).

About 25 minutes on two cores: two seeds of the arms that are asked about most, at the learning rates that were best
for the synchronous ones, and one PC at four batches. `SEEDS=5` for more seeds; `ARMS=delays` for the finer points,
`ARMS=rounds` for rounds of local steps, `ARMS=all`. How the costs change with size and length: ladder.py.

*To the loss*: how many times as soon five PCs have the loss of a setting as one PC has it, at the batch with which it
is soonest. Both are measured: the tokens that one PC takes until then (runs of parts of the text, each with its own
warm-up and cosine), and how many times as many tokens a second five PCs train (`make bench-wire`).

The effects of interest at 350M parameters are some thousandths of a nat: here the arms are ranked, no more. Every run
is a line in bench-results/learning.jsonl, and what is there already is not computed again. The last line is JSON.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import learning_arms as of
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import read_corpus
from aura.corpus.sequences import Sequences
from aura.model.gpt import GPT
from five_ranks import train
from learning_arms import ALONE, ARMS, GROUPS, RATES, SYNCHRONOUS
from measuring import Kept, corpus_of, interval, options_of_jobs, part_until, show
from measuring import Row as Line
from playing import Setting

# Of an optimizer, an arm, a learning rate and a part of the tokens, by seed
Losses = Callable[..., list[float]]


@dataclass(frozen=True)
class Job:
    optimizer: str
    arm: str
    lr: float
    seed: int
    part: float = 1.0  # of the tokens

    def config(self) -> TrainConfig:
        own = {"optimizer": self.optimizer, "lr": self.lr, "seed": self.seed}
        steps = round(self.part * of.STEPS * Setting().sequences / ARMS[self.arm].sequences)
        own |= {"steps": steps, "warmup_steps": round(of.WARMUP[self.optimizer] * steps / of.STEPS)}
        return resolve("gpt2-nano", {**of.MODEL, **of.SCHEDULE, **own})

    def key(self, corpus: str) -> str:
        """Equal where nothing differs that the loss depends on, but for the code."""
        return json.dumps([self.config().digest(), ARMS[self.arm].own(), corpus])


def compute(job: Job, corpus: Path) -> Line:
    """Loss [nats per token] and seconds."""
    config, opened = job.config(), read_corpus(corpus)
    sequences = (Sequences(opened, split, config.seq_len) for split in ("train", "validation"))
    return asdict(train(config, ARMS[job.arm], *sequences))


@dataclass(frozen=True)
class Row:
    """An arm; losses of every seed."""

    optimizer: str
    arm: str
    losses: Sequence[float]
    differences: Sequence[float]  # to the synchronous arm, seed by seed
    tokens_times: float | None = None  # five PCs with it train so many times as many tokens a second as one
    times_to_loss: float | None = None  # and have its loss so many times as soon

    def summary(self) -> Line:
        nats, (low, high) = statistics.mean(self.differences), interval(self.differences)
        times = {"tokens_times": self.tokens_times, "times_to_loss": self.times_to_loss}
        means = {"loss": statistics.mean(self.losses), "nats": nats, "lower_95": low, "upper_95": high}
        return {"optimizer": self.optimizer, "setting": self.arm, **means, **times}

    def cells(self) -> list[str]:
        low, high = interval(self.differences)
        difference, limits = f"{statistics.mean(self.differences):+.4f}", f"{low:+.4f} to {high:+.4f}"
        compared = ["–", "–"] if self.arm == SYNCHRONOUS else [difference, limits]
        times = ["–" if one is None else f"{one:.2f} x" for one in (self.tokens_times, self.times_to_loss)]
        return [self.optimizer, self.arm, f"{statistics.mean(self.losses):.4f}", *compared, *times]


def arms_of(optimizer: str, groups: Sequence[str]) -> list[str]:
    """The synchronous arm, where there is another, and each of them once."""
    asked = [arm for group in groups for arm in GROUPS[group][optimizer]]
    return list(dict.fromkeys([SYNCHRONOUS, *asked])) if asked else []


def measure(kept: Kept, losses: Losses, groups: Sequence[str], seeds: int, part: float) -> list[Row]:
    pairs = [(optimizer, arm) for optimizer in RATES for arm in arms_of(optimizer, groups)]
    # Seed by seed: who stops it has whole pairs.
    kept.results([Job(opt, arm, RATES[opt], seed, part) for seed in range(seeds) for opt, arm in pairs])
    rows = []
    for optimizer, arm in pairs:
        synchronous, found = (losses(optimizer, one, RATES[optimizer], part) for one in (SYNCHRONOUS, arm))
        differences = [loss - other for loss, other in zip(found, synchronous, strict=True)]
        rows.append(Row(optimizer, arm, found, differences))
    return rows


@dataclass(frozen=True)
class Alone:
    """One PC without a network, at one batch."""

    sequences: int  # per step
    lr: float
    losses: dict[float, float]  # by the part of the tokens, each at the end of a run of its own

    def cells(self) -> list[str]:
        return [str(self.sequences), f"{self.lr:g}", *(f"{self.losses[part]:.4f}" for part in of.PARTS)]


def alone(losses: Losses) -> list[Alone]:
    """With Muon, each batch at the best of its learning rates."""

    def mean(arm: str, lr: float, part: float) -> float:
        return statistics.mean(losses("muon", arm, lr, part))

    found = []
    for arm, rates in of.RATES_ALONE.items():
        lr = min(rates, key=lambda rate: mean(arm, rate, 1.0))
        found.append(Alone(ARMS[arm].sequences, lr, {part: mean(arm, lr, part) for part in of.PARTS}))
    return found


def timed(row: Row, ones: Sequence[Alone]) -> Row:
    """With its times, where its speed was measured; to its loss, where one PC comes to it between two of its runs."""
    speed, loss = of.SPEEDS.get(row.arm) if row.optimizer == "muon" else None, statistics.mean(row.losses)
    between = ones and all(one.losses[min(of.PARTS)] >= loss for one in ones)
    parts = [part_until(loss, one.losses) for one in ones] if between else []
    soonest = min((part for part in parts if not math.isnan(part)), default=None)
    return replace(row, tokens_times=speed, times_to_loss=speed * soonest if speed and soonest else None)


def show_all(rows: Sequence[Row], ones: Sequence[Alone], seeds: int) -> None:
    if rows:
        title = f"Validation loss after one pass, nats per token; differences to the same optimizer, {seeds} seeds"
        words = ("optimizer", "arm")
        figures = ("loss", "difference", "95 % interval", "in tokens", "to the loss")
        show(title, (*words, *figures), [row.cells() for row in rows], left=words)
    if ones:
        title = f"One PC, with Muon: loss after a part of the tokens, mean of {seeds} seeds"
        headings = ("windows a step", "lr", *(f"{part:g}" for part in of.PARTS))
        show(title, headings, [one.cells() for one in ones])


def main() -> int:
    parser = options_of_jobs(__doc__, "learning", os.cpu_count())
    add, groups = parser.add_argument, [*GROUPS, ALONE]
    usual, said = ["main", ALONE], "groups of arms (main alone)"
    add("--arms", nargs="+", choices=[*groups, "all"], default=usual, help=said)
    add("--seeds", type=int, default=2, metavar="N", help="paired seeds (2)")
    add(
        "--part", type=float, default=1.0, metavar="P", help="of the tokens and of the warm-up (1; at most 3)"
    )
    given, started = parser.parse_args(), time.perf_counter()
    seeds, asked = given.seeds, groups if "all" in given.arms else given.arms
    with (
        corpus_of(given.text, of.VOCABULARY) as corpus,
        closing(Kept(given.results, corpus, compute, given.workers)) as kept,
    ):

        def losses(optimizer: str, arm: str, lr: float, part: float = 1.0) -> list[float]:
            jobs = [Job(optimizer, arm, lr, seed, part) for seed in range(seeds)]
            return [row["loss"] for row in kept.results(jobs)]

        rows = measure(kept, losses, [group for group in asked if group in GROUPS], seeds, given.part)
        ones = alone(losses) if ALONE in asked else []
    if given.part == 1.0:
        rows = [timed(row, ones) for row in rows]
    show_all(rows, ones, seeds)
    seconds = round(time.perf_counter() - started)
    print(f"{seconds} s; every run: {given.results}")
    soonest = max(rows, key=lambda row: row.times_to_loss or 0.0, default=None)
    first = soonest.summary() if soonest and soonest.times_to_loss else {}
    parameters = GPT(Job("adamw", SYNCHRONOUS, 1.0, 0).config(), "meta").parameter_count()
    about = {"sizes": [parameters], "seeds": seeds, "evidence": "cpu", "part": given.part, "seconds": seconds}
    found = {"arms": [row.summary() for row in rows], "alone": [asdict(one) for one in ones]}
    print(json.dumps({"bench": "learning", **first, **about, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
