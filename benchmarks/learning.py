"""`make bench-learning`: what fewer bits on the wire and a bounded delay cost in loss, on a very small model.

One process plays five ranks (five_ranks.py) on one pass over the lab's Spanish text. Every arm is compared with the
synchronous fp32 arm of the same optimizer and the same seed (initial weights and order of the text): the table gives
the mean of the differences and its 95 % interval (Student's t over the paired seeds).

Short form, about ten minutes on two cores: two seeds of the arms that are asked about most, at the learning rates that
the long form has chosen. `SEEDS=5` for more seeds; `ARMS=causes` for what a delay's cost is made of, `ARMS=alone` for
when one PC, at another batch, comes to the loss of five, `ARMS="formats delays"` for the finer points, `ARMS=all`.
Long form (`LONG=1`): everything, five seeds; the synchronous arm of each optimizer takes the best of its learning rates
(by the first two seeds); every arm that loses to it is tried at half that rate too, and judged by the better one.

The effects of interest at 350M parameters are some thousandths of a nat: here the arms are ranked, no more. Every run
is a line in bench-results/learning.jsonl, and what is there already is not computed again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import read_corpus
from aura.corpus.windows import Windows
from aura.model.gpt import GPT
from five_ranks import Setting, train
from learning_arms import (
    ALONE,
    ARMS,
    CHOSEN,
    FIVE,
    GROUPS,
    MODEL,
    PARTS,
    RATES,
    RATES_ALONE,
    SCHEDULE,
    SEEDS,
    SPEEDUPS,
    STEPS,
    SYNCHRONOUS,
    TUNING_SEEDS,
    VOCABULARY,
    WARMUP,
)
from loops import prepare_corpus, spanish_text
from rich.console import Console
from rich.table import Table

# Two-sided 95 % quantiles of Student's t by degrees of freedom
QUANTILES = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Job:
    optimizer: str
    arm: str
    lr: float
    seed: int
    part: float = 1.0  # of the tokens

    def config(self) -> TrainConfig:
        own = {"optimizer": self.optimizer, "lr": self.lr, "seed": self.seed}
        steps = round(self.part * STEPS * Setting().windows / ARMS[self.arm].windows)
        own |= {"steps": steps, "warmup_steps": round(WARMUP[self.optimizer] * steps / STEPS)}
        return resolve("gpt2-nano", {**MODEL, **SCHEDULE, **own})

    def key(self, corpus: str) -> str:
        """Equal where nothing differs that the loss depends on, but for the code."""
        return json.dumps([self.config().digest(), ARMS[self.arm].own(), corpus])


@dataclass(frozen=True)
class Row:
    """An arm at the learning rate it is judged by; losses of every seed."""

    optimizer: str
    arm: str
    lr: float
    losses: Sequence[float]
    differences: Sequence[float]  # to the synchronous arm, seed by seed
    tried: dict[float, float]  # learning rate: mean loss over the first seeds

    def summary(self) -> dict[str, object]:
        low, high = interval(self.differences)
        return {
            "optimizer": self.optimizer,
            "arm": self.arm,
            "lr": self.lr,
            "loss": statistics.mean(self.losses),
            "difference": statistics.mean(self.differences),
            "lower_95": low,
            "upper_95": high,
        }


class Runs:
    """Computes jobs, each once, and keeps them in a file."""

    def __init__(self, file: Path, corpus: Path, workers: int, console: Console) -> None:
        self.file, self.corpus, self.console = file, corpus, console
        self.fingerprint = read_corpus(corpus).fingerprint
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.known: dict[str, float] = {line["key"]: line["loss"] for line in map(json.loads, lines)}
        # One thread for each: the matrices are too small for more.
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))

    def losses(self, jobs: Sequence[Job]) -> list[float]:
        missing = [job for job in dict.fromkeys(jobs) if job.key(self.fingerprint) not in self.known]
        results = self.pool.map(compute, missing, [self.corpus] * len(missing))
        for count, (job, (loss, seconds)) in enumerate(zip(missing, results, strict=True), 1):
            key = job.key(self.fingerprint)
            line = {**asdict(job), "loss": loss, "seconds": seconds, "key": key}
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            self.known[key] = loss
            about = f"{job.optimizer}, {job.arm}, lr {job.lr:g}, seed {job.seed}, part {job.part:g}"
            self.console.print(
                f"{count}/{len(missing)} {about}: {loss:.4f} ({seconds:.0f} s)", highlight=False
            )
        return [self.known[job.key(self.fingerprint)] for job in jobs]

    def of(self, optimizer: str, arm: str, lr: float, seeds: int, part: float = 1.0) -> list[float]:
        """Losses of the first seeds."""
        return self.losses([Job(optimizer, arm, lr, seed, part) for seed in range(seeds)])


def compute(job: Job, corpus: Path) -> tuple[float, float]:
    """Loss [nats per token] and seconds; in a process of the pool."""
    config, opened = job.config(), read_corpus(corpus)
    windows = (Windows(opened, split, config.seq_len) for split in ("train", "validation"))
    result = train(config, ARMS[job.arm], *windows)
    return result.loss, result.seconds


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean of paired differences (Student, 1908)."""
    mean, n = statistics.mean(differences), len(differences)
    if n < 2:
        return -math.inf, math.inf
    half = QUANTILES[n - 1] * statistics.stdev(differences) / math.sqrt(n)
    return mean - half, mean + half


def arms_of(optimizer: str, groups: Sequence[str]) -> list[str]:
    """The synchronous arm, where there is another, and each of them once."""
    asked = [arm for group in groups for arm in GROUPS[group].get(optimizer, ())]
    return list(dict.fromkeys([SYNCHRONOUS, *asked])) if asked else []


def measure(runs: Runs, groups: Sequence[str], seeds: int, part: float, long: bool) -> list[Row]:
    rates = tuned(runs) if long else {optimizer: {lr: math.nan} for optimizer, lr in CHOSEN.items()}
    best = {optimizer: min(losses, key=losses.__getitem__) for optimizer, losses in rates.items()}
    pairs = [(optimizer, arm) for optimizer in best for arm in arms_of(optimizer, groups)]
    # Seed by seed: who stops it has whole pairs.
    runs.losses([Job(opt, arm, best[opt], seed, part) for seed in range(seeds) for opt, arm in pairs])
    rows = []
    for optimizer, arm in pairs:
        lr, tried = best[optimizer], rates[optimizer] if arm == SYNCHRONOUS else {}
        synchronous = runs.of(optimizer, SYNCHRONOUS, lr, seeds, part)
        losses = runs.of(optimizer, arm, lr, seeds, part)
        if long and statistics.mean(losses) > statistics.mean(synchronous):
            tried = {
                rate: statistics.mean(runs.of(optimizer, arm, rate, TUNING_SEEDS, part))
                for rate in (lr, lr / 2)
            }
            lr = min(tried, key=tried.__getitem__)
            losses = runs.of(optimizer, arm, lr, seeds, part)
        differences = [loss - other for loss, other in zip(losses, synchronous, strict=True)]
        rows.append(Row(optimizer, arm, lr, losses, differences, tried))
    return rows


def tuned(runs: Runs) -> dict[str, dict[float, float]]:
    """Mean loss of the synchronous arm of each optimizer at each of its learning rates."""
    return {
        optimizer: {lr: statistics.mean(runs.of(optimizer, SYNCHRONOUS, lr, TUNING_SEEDS)) for lr in rates}
        for optimizer, rates in RATES.items()
    }


def table(rows: Sequence[Row], seeds: int) -> Table:
    title = (
        f"Validation loss after one pass, nats per token; differences to the same optimizer, {seeds} seeds"
    )
    found = Table(title=title)
    for heading in ("optimizer", "arm"):
        found.add_column(heading)
    for heading in ("lr", "loss", "difference", "95 % interval", "learning rates tried"):
        found.add_column(heading, justify="right")
    for row in rows:
        low, high = interval(row.differences)
        first = row.arm == SYNCHRONOUS
        if first:
            found.add_section()
        found.add_row(
            row.optimizer,
            row.arm,
            f"{row.lr:g}",
            f"{statistics.mean(row.losses):.4f}",
            "–" if first else f"{statistics.mean(row.differences):+.4f}",
            "–" if first else f"{low:+.4f} to {high:+.4f}",
            ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in row.tried.items() if not math.isnan(loss)),
        )
    return found


@dataclass(frozen=True)
class Alone:
    """One PC without a network, at one batch."""

    windows: int  # per step
    lr: float
    losses: dict[
        float, float
    ]  # by the part of the tokens that it has learnt, each at the end of a run of its own
    tried: dict[float, float]  # learning rate: mean loss after all tokens

    def part_until(self, loss: float) -> float:
        """Of the tokens, to come to this loss; between two runs on a straight line over the logarithm of the tokens.
        NaN where none of the runs is above it, or none below."""
        for (less, before), (more, after) in pairwise(sorted(self.losses.items())):
            if before >= loss >= after:
                return less * (more / less) ** ((before - loss) / (before - after))
        return math.nan


def alone(runs: Runs, seeds: int) -> list[Alone]:
    """With Muon."""
    found = []
    for arm, rates in RATES_ALONE.items():
        tried = {lr: statistics.mean(runs.of("muon", arm, lr, seeds)) for lr in rates}
        lr = min(tried, key=tried.__getitem__)
        losses = {part: statistics.mean(runs.of("muon", arm, lr, seeds, part)) for part in PARTS}
        found.append(Alone(ARMS[arm].windows, lr, losses, tried))
    return found


def table_alone(found: Sequence[Alone], five: float, seeds: int) -> Table:
    table = Table(title=f"One PC until it has the loss of five with {FIVE} ({five:.4f}), {seeds} seeds; Muon")
    headings = ("windows a step", "lr", "loss after all tokens", "part of the tokens until then")
    for heading in (*headings, *(f"five are faster, {card}" for card in SPEEDUPS)):
        table.add_column(heading, justify="right")
    for one in found:
        part = one.part_until(five)
        times = [f"{part * speedup:.2f} x" for speedup in SPEEDUPS.values()]
        table.add_row(str(one.windows), f"{one.lr:g}", f"{one.losses[1.0]:.4f}", f"{part:.2f}", *times)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true", help="all arms, five seeds, learning rates tuned")
    parser.add_argument(
        "--arms", nargs="+", choices=[*GROUPS, ALONE, "all"], default=["main"], help="groups of arms (main)"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="paired seeds (2, or 5 with --long; at most 10)"
    )
    parser.add_argument(
        "--part",
        type=float,
        default=1.0,
        metavar="P",
        help="of the tokens, and of the warm-up (1; at most 3)",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), metavar="N", help="runs at a time (one per core)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="DIR", help="Spanish text (default: fetched from Debian)"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("bench-results/learning.jsonl"), metavar="FILE",
        help="what is there is not computed again (bench-results/learning.jsonl)",
    )  # fmt: skip
    arguments = parser.parse_args()
    console, started = Console(), time.perf_counter()
    form = "long" if arguments.long else "short"
    seeds = arguments.seeds or SEEDS[form]
    asked = [*GROUPS, ALONE] if arguments.long or "all" in arguments.arms else arguments.arms
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(arguments.text or spanish_text(), Path(directory), VOCABULARY)
        runs = Runs(arguments.results, corpus, arguments.workers, console)
        rows = measure(
            runs, [group for group in asked if group != ALONE], seeds, arguments.part, arguments.long
        )
        if rows:
            console.print(table(rows, seeds))
        ones = alone(runs, seeds) if ALONE in asked else []
        if ones:
            five = statistics.mean(runs.of("muon", FIVE, CHOSEN["muon"], seeds))
            console.print(table_alone(ones, five, seeds))
        runs.pool.shutdown()
    seconds = round(time.perf_counter() - started)
    console.print(f"{seconds} s; every run: {arguments.results}", highlight=False)
    about = {"bench": "learning", "form": form, "seeds": seeds, "evidence": "cpu", "parameters": parameters()}
    about["part"] = arguments.part
    print(
        json.dumps(
            {
                **about,
                "seconds": seconds,
                "arms": [row.summary() for row in rows],
                "alone": [asdict(one) for one in ones],
            }
        )
    )
    return 0


def parameters() -> int:
    return GPT(Job("adamw", SYNCHRONOUS, 1.0, 0).config(), "meta").parameter_count()


if __name__ == "__main__":
    sys.exit(main())
