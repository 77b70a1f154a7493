"""`make bench-learning`: what fewer bits on the wire and a bounded delay cost in loss, on a very small model.

One process plays five ranks (five_ranks.py) on one pass over the lab's Spanish text. Every arm is compared with the
synchronous fp32 arm of the same optimizer and the same seed (initial weights and order of the text): the table gives
the mean of the differences and its 95 % interval (Student's t over the paired seeds).

Short form, about ten minutes on two cores: two seeds, at the learning rates that the long form has chosen.
Long form (`LONG=1`): five seeds; the synchronous arm of each optimizer takes the best of its learning rates (by the
first two seeds); every arm that loses to it is tried at half that rate too, and judged by the better of the two.

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
from multiprocessing import get_context
from pathlib import Path

import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import read_corpus
from aura.corpus.windows import Windows
from aura.model.gpt import GPT
from five_ranks import Setting, train
from loops import prepare_corpus, spanish_text
from rich.console import Console
from rich.table import Table

VOCABULARY = 512
# 134,912 parameters; 384,000 tokens, a third of the text. betas as in gpt2-medium; the last learning rate is zero.
MODEL = {"layers": 2, "d_model": 64, "heads": 2, "seq_len": 32, "vocab_size": VOCABULARY}
SCHEDULE = {"steps": 300, "min_lr_ratio": 0.0, "beta2": 0.95}
# With 30 steps of warm-up, some seeds of AdamW stay where pairs of tokens are all that is learnt (4.3 nats).
WARMUP = {"muon": 30, "adamw": 100}
# Of the synchronous arms; the short form takes those that the long form has chosen.
RATES = {"muon": (1.4e-2, 2e-2, 2.8e-2), "adamw": (5.6e-3, 8e-3, 1.1e-2, 1.6e-2)}
CHOSEN = {"muon": 2e-2, "adamw": 1.1e-2}
SEEDS = {"short": 2, "long": 5}
TUNING_SEEDS = 2
SYNCHRONOUS = "synchronous, fp32"
INT4 = Setting("int4", "int4")
ARMS = {
    SYNCHRONOUS: Setting(),
    "1/4 late": Setting(late=0.25),
    "1/2 late": Setting(late=0.5),
    "1 late": Setting(late=1.0),
    "1/2 late, predicted weights": Setting(late=0.5, predicted=True),
    "1 late, predicted weights": Setting(late=1.0, predicted=True),
    "int8": Setting("int8", "int8"),
    "int4": INT4,
    "int4 gradients": Setting(gradients="int4"),
    "int4 gradients, error feedback": Setting(gradients="int4", error_feedback=True),
    "int4 differences": Setting(differences="int4"),
    "int4 + 1/2 late, predicted": Setting("int4", "int4", late=0.5, predicted=True),
    "int4 + 1 late, predicted": Setting("int4", "int4", late=1.0, predicted=True),
    "int8 + 1 late, predicted": Setting("int8", "int8", late=1.0, predicted=True),
}
# AdamW loses most to any delay, so that its finer points are left out.
MUON_ONLY = {
    "int4 gradients",
    "int4 gradients, error feedback",
    "int4 differences",
    "int4 + 1 late, predicted",
    "int8 + 1 late, predicted",
}
# Two-sided 95 % quantiles of Student's t by degrees of freedom
QUANTILES = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Job:
    optimizer: str
    arm: str
    lr: float
    seed: int

    def config(self) -> TrainConfig:
        own = {"optimizer": self.optimizer, "lr": self.lr, "seed": self.seed}
        own["warmup_steps"] = WARMUP[self.optimizer]
        return resolve("gpt2-nano", {**MODEL, **SCHEDULE, **own})

    def key(self, corpus: str) -> str:
        """Equal where nothing differs that the loss depends on, but for the code."""
        return json.dumps([self.config().digest(), asdict(ARMS[self.arm]), corpus])


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
            about = f"{job.optimizer}, {job.arm}, lr {job.lr:g}, seed {job.seed}"
            self.console.print(
                f"{count}/{len(missing)} {about}: {loss:.4f} ({seconds:.0f} s)", highlight=False
            )
        return [self.known[job.key(self.fingerprint)] for job in jobs]

    def of(self, optimizer: str, arm: str, lr: float, seeds: int) -> list[float]:
        """Losses of the first seeds."""
        return self.losses([Job(optimizer, arm, lr, seed) for seed in range(seeds)])


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


def measure(runs: Runs, seeds: int, long: bool) -> list[Row]:
    rates = tuned(runs) if long else {optimizer: {lr: math.nan} for optimizer, lr in CHOSEN.items()}
    best = {optimizer: min(losses, key=losses.__getitem__) for optimizer, losses in rates.items()}
    pairs = [
        (optimizer, arm) for optimizer in best for arm in ARMS if optimizer == "muon" or arm not in MUON_ONLY
    ]
    # Seed by seed: who stops it has whole pairs.
    runs.losses([Job(opt, arm, best[opt], seed) for seed in range(seeds) for opt, arm in pairs])
    rows = []
    for optimizer, arm in pairs:
        lr, tried = best[optimizer], rates[optimizer] if arm == SYNCHRONOUS else {}
        synchronous = runs.of(optimizer, SYNCHRONOUS, lr, seeds)
        losses = runs.of(optimizer, arm, lr, seeds)
        if long and statistics.mean(losses) > statistics.mean(synchronous):
            tried = {
                rate: statistics.mean(runs.of(optimizer, arm, rate, TUNING_SEEDS)) for rate in (lr, lr / 2)
            }
            lr = min(tried, key=tried.__getitem__)
            losses = runs.of(optimizer, arm, lr, seeds)
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true", help="five seeds, learning rates tuned")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="paired seeds (2, or 5 with --long; at most 10)"
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
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(arguments.text or spanish_text(), Path(directory), VOCABULARY)
        rows = measure(Runs(arguments.results, corpus, arguments.workers, console), seeds, arguments.long)
    console.print(table(rows, seeds))
    seconds = round(time.perf_counter() - started)
    console.print(f"{seconds} s; every run: {arguments.results}", highlight=False)
    about = {"bench": "learning", "form": form, "seeds": seeds, "evidence": "cpu", "parameters": parameters()}
    print(json.dumps({**about, "seconds": seconds, "arms": [row.summary() for row in rows]}))
    return 0


def parameters() -> int:
    return GPT(Job("adamw", SYNCHRONOUS, 1.0, 0).config(), "meta").parameter_count()


if __name__ == "__main__":
    sys.exit(main())
