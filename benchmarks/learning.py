"""`make bench-learning`: what fewer bits on the wire and a bounded delay cost in loss, on a very small model.

One process plays five ranks (five_ranks.py) on one pass over the lab's Spanish text. Every arm is compared with the
synchronous fp32 arm of the same optimizer and the same seed (initial weights and order of the text): the table gives
the mean of the differences and its 95 % interval (Student's t over the paired seeds).

Short form, about ten minutes on two cores: two seeds of the arms that are asked about most, at the learning rates that
the long form has chosen. `SEEDS=5` for more seeds; `ARMS=causes` for what a delay's cost is made of, `ARMS=alone` for
when one PC, at another batch, comes to the loss of five, `ARMS=rounds` for rounds of local steps, `ARMS=ladder` for
how the costs change with size and length (hours), `ARMS="formats delays"` for the finer
points, `ARMS=all`.
Long form (`LONG=1`): everything, five seeds; the synchronous arm of each optimizer takes the best of its learning rates
(by the first two seeds); every arm that loses to it is tried at half that rate too, and judged by the better one.

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
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import learning_arms as of
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import read_corpus
from aura.corpus.windows import Windows
from aura.model.gpt import GPT
from five_ranks import train
from ladder import Rung, show_ladder
from learning_arms import ALONE, ARMS, CHOSEN, FIVE, GROUPS, LADDER, SYNCHRONOUS
from measuring import Kept, corpus_of, interval, options_of_jobs, part_until, show
from measuring import Row as Line
from playing import Setting

Losses = Callable[
    ..., list[float]
]  # of an optimizer, an arm, a learning rate, so many seeds, a part of the tokens


@dataclass(frozen=True)
class Job:
    optimizer: str
    arm: str
    lr: float
    seed: int
    part: float = 1.0  # of the tokens
    size: str = of.SMALLEST

    def config(self) -> TrainConfig:
        own = {"optimizer": self.optimizer, "lr": self.lr, "seed": self.seed}
        steps = round(self.part * of.STEPS * Setting().windows / ARMS[self.arm].windows)
        own |= {"steps": steps, "warmup_steps": round(of.WARMUP[self.optimizer] * steps / of.STEPS)}
        return resolve("gpt2-nano", {**of.MODEL, **of.SIZES[self.size], **of.SCHEDULE, **own})

    def key(self, corpus: str) -> str:
        """Equal where nothing differs that the loss depends on, but for the code."""
        return json.dumps([self.config().digest(), ARMS[self.arm].own(), corpus])


def compute(job: Job, corpus: Path) -> Line:
    """Loss [nats per token] and seconds."""
    config, opened = job.config(), read_corpus(corpus)
    windows = (Windows(opened, split, config.seq_len) for split in ("train", "validation"))
    return asdict(train(config, ARMS[job.arm], *windows))


@dataclass(frozen=True)
class Row:
    """An arm at the learning rate it is judged by; losses of every seed."""

    optimizer: str
    arm: str
    lr: float
    losses: Sequence[float]
    differences: Sequence[float]  # to the synchronous arm, seed by seed
    tried: dict[float, float]  # learning rate: mean loss over the first seeds

    def summary(self) -> Line:
        low, high = interval(self.differences)
        means = {"loss": statistics.mean(self.losses), "difference": statistics.mean(self.differences)}
        about = {"optimizer": self.optimizer, "arm": self.arm, "lr": self.lr}
        return {**about, **means, "lower_95": low, "upper_95": high}

    def cells(self) -> list[str]:
        low, high = interval(self.differences)
        difference, limits = f"{statistics.mean(self.differences):+.4f}", f"{low:+.4f} to {high:+.4f}"
        compared = ["–", "–"] if self.arm == SYNCHRONOUS else [difference, limits]
        tried = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in self.tried.items())
        return [
            self.optimizer,
            self.arm,
            f"{self.lr:g}",
            f"{statistics.mean(self.losses):.4f}",
            *compared,
            tried,
        ]


def arms_of(optimizer: str, groups: Sequence[str]) -> list[str]:
    """The synchronous arm, where there is another, and each of them once."""
    asked = [arm for group in groups for arm in GROUPS[group][optimizer]]
    return list(dict.fromkeys([SYNCHRONOUS, *asked])) if asked else []


def means(
    losses: Losses, optimizer: str, arm: str, rates: Sequence[float], seeds: int, part: float
) -> dict[float, float]:
    """By learning rate."""
    return {lr: statistics.mean(losses(optimizer, arm, lr, seeds, part)) for lr in rates}


def measure(
    kept: Kept, losses: Losses, groups: Sequence[str], seeds: int, part: float, long: bool
) -> list[Row]:
    tuned: dict[str, dict[float, float]] = {optimizer: {} for optimizer in CHOSEN}
    best = dict(CHOSEN)
    if long:
        for optimizer, rates in of.RATES.items():
            tuned[optimizer] = means(losses, optimizer, SYNCHRONOUS, rates, of.TUNING_SEEDS, 1.0)
            best[optimizer] = min(tuned[optimizer], key=tuned[optimizer].__getitem__)
    pairs = [(optimizer, arm) for optimizer in best for arm in arms_of(optimizer, groups)]
    # Seed by seed: who stops it has whole pairs.
    kept.results([Job(opt, arm, best[opt], seed, part) for seed in range(seeds) for opt, arm in pairs])
    rows = []
    for optimizer, arm in pairs:
        lr, tried = best[optimizer], tuned[optimizer] if arm == SYNCHRONOUS else {}
        synchronous = losses(optimizer, SYNCHRONOUS, lr, seeds, part)
        found = losses(optimizer, arm, lr, seeds, part)
        if long and statistics.mean(found) > statistics.mean(synchronous):
            tried = means(losses, optimizer, arm, (lr, lr / 2), of.TUNING_SEEDS, part)
            lr = min(tried, key=tried.__getitem__)
            found = losses(optimizer, arm, lr, seeds, part)
        differences = [loss - other for loss, other in zip(found, synchronous, strict=True)]
        rows.append(Row(optimizer, arm, lr, found, differences, tried))
    return rows


@dataclass(frozen=True)
class Alone:
    """One PC without a network, at one batch."""

    windows: int  # per step
    lr: float
    losses: dict[float, float]  # by the part of the tokens, each at the end of a run of its own
    tried: dict[float, float]  # learning rate: mean loss after all tokens

    def cells(self, five: float) -> list[str]:
        part = part_until(five, self.losses)
        times = [f"{part * speedup:.2f} x" for speedup in of.SPEEDUPS.values()]
        return [str(self.windows), f"{self.lr:g}", f"{self.losses[1.0]:.4f}", f"{part:.2f}", *times]


def alone(losses: Losses, seeds: int) -> list[Alone]:
    """With Muon."""
    found = []
    for arm, rates in of.RATES_ALONE.items():
        tried = means(losses, "muon", arm, rates, seeds, 1.0)
        lr = min(tried, key=tried.__getitem__)
        parts = {part: statistics.mean(losses("muon", arm, lr, seeds, part)) for part in of.PARTS}
        found.append(Alone(ARMS[arm].windows, lr, parts, tried))
    return found


def ladder(kept: Kept, seeds: int) -> list[Rung]:
    """Short runs of small models first: who stops it has whole rungs."""
    rungs = []
    for part, (size, lr) in product(of.LENGTHS, of.RATES_OF_LADDER.items()):
        arms = (SYNCHRONOUS, *of.ARMS_OF_LADDER)
        jobs = [Job("muon", arm, lr, seed, part, size) for arm in arms for seed in range(seeds)]
        losses = [row["loss"] for row in kept.results(jobs)]
        synchronous, *others = (losses[start : start + seeds] for start in range(0, len(losses), seeds))
        costs = [[loss - other for loss, other in zip(found, synchronous, strict=True)] for found in others]
        parameters = GPT(jobs[0].config(), "meta").parameter_count()
        by_arm = dict(zip(of.ARMS_OF_LADDER, costs, strict=True))
        steps, loss = jobs[0].config().steps, statistics.mean(synchronous)
        rungs.append(Rung(size, parameters, steps, lr, loss, by_arm))
    return rungs


def show_all(rows: Sequence[Row], ones: Sequence[Alone], five: float, seeds: int) -> None:
    if rows:
        title = f"Validation loss after one pass, nats per token; differences to the same optimizer, {seeds} seeds"
        words = ("optimizer", "arm")
        figures = ("lr", "loss", "difference", "95 % interval", "learning rates tried")
        show(title, (*words, *figures), [row.cells() for row in rows], left=words)
    if ones:
        title = f"One PC until it has the loss of five with {FIVE} ({five:.4f}), {seeds} seeds; Muon"
        headings = ("windows a step", "lr", "loss after all tokens", "part of the tokens until then")
        times = (f"five are faster, {card}" for card in of.SPEEDUPS)
        show(title, (*headings, *times), [one.cells(five) for one in ones])


def main() -> int:
    parser = options_of_jobs(__doc__, "learning", os.cpu_count())
    add = parser.add_argument
    add("--long", action="store_true", help="all arms, five seeds, learning rates tuned")
    groups = [*GROUPS, ALONE, LADDER]
    add("--arms", nargs="+", choices=[*groups, "all"], default=["main"], help="groups of arms (main)")
    add("--seeds", type=int, metavar="N", help="paired seeds (2, or 5 with --long)")
    add(
        "--part", type=float, default=1.0, metavar="P", help="of the tokens and of the warm-up (1; at most 3)"
    )
    given, started = parser.parse_args(), time.perf_counter()
    form = "long" if given.long else "short"
    seeds = given.seeds or of.SEEDS[form]
    asked = groups if given.long or "all" in given.arms else given.arms
    with corpus_of(given.text, of.VOCABULARY) as corpus:
        kept = Kept(given.results, corpus, compute, given.workers)

        def losses(optimizer: str, arm: str, lr: float, seeds: int, part: float = 1.0) -> list[float]:
            jobs = [Job(optimizer, arm, lr, seed, part) for seed in range(seeds)]
            return [row["loss"] for row in kept.results(jobs)]

        rungs = ladder(kept, seeds) if LADDER in asked else []
        rows = measure(
            kept, losses, [group for group in asked if group in GROUPS], seeds, given.part, given.long
        )
        ones = alone(losses, seeds) if ALONE in asked else []
        five = statistics.mean(losses("muon", FIVE, CHOSEN["muon"], seeds)) if ones else math.nan
    show_all(rows, ones, five, seeds)
    if rungs:
        show_ladder(rungs, seeds)
    seconds = round(time.perf_counter() - started)
    print(f"{seconds} s; every run: {given.results}")
    parameters = GPT(Job("adamw", SYNCHRONOUS, 1.0, 0).config(), "meta").parameter_count()
    about = {"bench": "learning", "form": form, "seeds": seeds, "evidence": "cpu", "parameters": parameters}
    found = {"arms": [row.summary() for row in rows], "alone": [asdict(one) for one in ones]}
    found["sizes"] = [rung.summary() for rung in rungs]
    print(json.dumps({**about, "part": given.part, "seconds": seconds, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
