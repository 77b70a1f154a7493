"""What every benchmark does: take options, make a corpus, run a loop, keep results, compute intervals, draw tables."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from aura.corpus.corpus import read_corpus
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
# Nothing but training: no validation to speak of, no checkpoint but the last.
QUIET = {"validate_every": 10**6, "validation_windows": 1, "save_every": 10**6}
# Two-sided 95 % quantiles of Student's t by degrees of freedom
QUANTILES = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Settings = Mapping[str, Any]
Row = dict[str, Any]


def options(about: str | None, text: bool = True) -> ArgumentParser:
    """text: with an option for the corpus' text."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    if text:
        parser.add_argument(
            "--text", type=Path, metavar="DIR", help="Spanish text (default: fetched from Debian)"
        )
    return parser


def options_of_jobs(about: str | None, name: str, workers: int | None) -> ArgumentParser:
    """With those of Kept: bench-results/<name>.jsonl."""
    parser, results = options(about), Path("bench-results", f"{name}.jsonl")
    add = parser.add_argument
    add("--workers", type=int, default=workers, metavar="N", help=f"runs at a time ({workers})")
    add("--results", type=Path, default=results, metavar="FILE", help=f"of every run, once ({results})")
    return parser


def run(command: list[str]) -> str:
    """What the command prints. Ends the benchmark with its output where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def spanish_text() -> Path:
    """The documentation corpus' text, fetched from Debian where it is not in the cache."""
    script = [HERE.parent / "tests/lab/spanish-docs"]
    return Path(subprocess.check_output(script, text=True).splitlines()[-1])


@contextmanager
def corpus_of(text: Path | None, vocabulary: int, validation: float = 0.05) -> Iterator[Path]:
    """Prepared for as long as the benchmark runs; with more of it for validation than usual, so that small differences
    show."""
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory, "corpus")
        command = [*aura("prepare"), "--input", str(text or spanish_text()), "--output", str(corpus)]
        run([*command, f"--vocab-size={vocabulary}", f"--validation-fraction={validation}"])
        yield corpus


def aura(command: str) -> list[str]:
    return [sys.executable, "-m", "aura", command]


def flags(settings: Settings) -> list[str]:
    """Settings as `aura train` takes them."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


@dataclass(frozen=True)
class Run:
    losses: list[float]  # nats per token, of every step
    seconds: list[float]  # the clock after every step
    validation_loss: float | None
    took: float  # seconds

    def steps_per_second(self, skip: int) -> float:
        """After `skip` steps, which may compile and warm up."""
        return (len(self.seconds) - 1 - skip) / (self.seconds[-1] - self.seconds[skip])


def ours(preset: str, corpus: Path, settings: Settings) -> Run:
    """`aura train` itself. TensorBoard's curve holds the loss of every step and the time when it was written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as directory:
        run_dir, began = Path(directory, "run"), time.perf_counter()
        words = [f"--preset={preset}", f"--corpus={corpus}", f"--run-dir={run_dir}"]
        run([*aura("train"), *words, *flags(settings)])
        took = time.perf_counter() - began
        curves = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
        curves.Reload()
        events = curves.Scalars("Loss/train_step")
        done = json.loads((run_dir / "done.json").read_text(encoding="utf-8"))
    return Run([e.value for e in events], [e.wall_time for e in events], done["validation_loss"], took)


def plain_command(preset: str, corpus: Path, settings: Settings, *more: str) -> list[str]:
    words = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, str(HERE / "reference_loop.py"), "--preset", preset, "--corpus", str(corpus)]
    return [*command, "--set", *words, *more]


def plain(preset: str, corpus: Path, settings: Settings, model: str = "nanogpt") -> Run:
    """The reference loop with one of its models."""
    found = json.loads(run(plain_command(preset, corpus, settings, f"--model={model}")))
    seconds = [second for _, second in found["points"]]
    return Run(found["losses"], seconds, found["validation_loss"], found["took"])


class Kept:
    """Jobs (dataclasses whose `key` says all that their result depends on) that are computed once: each result is a
    line of a file as soon as it is there, so a benchmark goes on where it was stopped."""

    def __init__(
        self, file: Path, corpus: Path, compute: Callable[[Any, Path], Row], workers: int = 1
    ) -> None:
        self.file, self.corpus, self.compute = file, corpus, compute
        # One thread for each: the matrices are too small for more.
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
        self.fingerprint = read_corpus(corpus).fingerprint
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.known: dict[str, Row] = {row["key"]: row for row in map(json.loads, lines) if "key" in row}

    def close(self) -> None:
        """At the interpreter's own end the pool would complain behind the last line."""
        self.pool.shutdown()

    def results(self, jobs: Sequence[Any]) -> list[Row]:
        missing = [job for job in dict.fromkeys(jobs) if job.key(self.fingerprint) not in self.known]
        results = self.pool.map(self.compute, missing, [self.corpus] * len(missing))
        for count, (job, result) in enumerate(zip(missing, results, strict=True), 1):
            row = {**asdict(job), **result, "key": job.key(self.fingerprint)}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            self.known[row["key"]] = row
            numbers = (
                f"{n} {v:.6g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items() if n != "key"
            )
            print(f"{count}/{len(missing)}", ", ".join(numbers), flush=True)
        return [self.known[job.key(self.fingerprint)] for job in jobs]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean of paired differences (Student, 1908)."""
    mean, freedom = statistics.mean(differences), len(differences) - 1
    if not freedom:
        return -math.inf, math.inf
    half = student(freedom) * statistics.stdev(differences) / math.sqrt(freedom + 1)
    return mean - half, mean + half


def student(freedom: int) -> float:
    """The quantile of Student's t; from ten degrees of freedom on by Abramowitz and Stegun, 26.7.5."""
    if freedom < len(QUANTILES):
        return QUANTILES[freedom]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def part_until(target: float, of_parts: dict[float, float]) -> float:
    """Of the tokens, to come to this loss; between two runs on a straight line over the logarithm of the tokens. NaN
    where none of the runs is above it, or none below."""
    for (less, before), (more, after) in pairwise(sorted(of_parts.items())):
        if before >= target >= after:
            return less * (more / less) ** ((before - target) / (before - after))
    return math.nan


def show(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()
) -> None:
    """A table; columns in `left` are words, the others numbers."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def write_results(name: str, results: Any) -> Path:
    """bench-results/<name>.json in the directory where make was called."""
    file = Path("bench-results", f"{name}.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return file
