"""`make bench`: our loop against two others on this machine's CPU, in one run.

Speed: tokens/s of `aura train` and of reference_loop.py, eager and compiled, at two sizes. The two take turns, and each
figure is the median of the repetitions. Their losses are compared step by step.
Learning: validation loss of `aura train` and of transformers_loop.py after equal tokens of real Spanish text.

At most ten minutes on two cores. The table goes to the terminal, every figure to bench-results/cpu.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from aura.config import resolve
from loops import HERE, QUIET, Run, Settings, loop, ours, reference, run, write_results
from rich.console import Console
from rich.table import Table

PRESET = "gpt2-nano"
VOCABULARY = 2048
LOSSES = 200  # steps whose losses are compared, at most


@dataclass(frozen=True)
class Size:
    """`settings` come after the preset's; the first `skip` steps are not timed."""

    name: str
    settings: Settings
    skip: int


SIZES = (
    Size("gpt2-nano: 2 x 128, seq 128", {"steps": 200}, skip=40),
    Size(
        "4 x 256, seq 256",
        {"layers": 4, "d_model": 256, "heads": 4, "seq_len": 256, "steps": 40, "lr": 2e-3},
        skip=10,
    ),
)
# One epoch of the documentation corpus.
LEARNING = {"steps": 750, "batch_size": 8, "warmup_steps": 40, "validation_windows": 400}
LEARNING_QUIET = {"validate_every": 10**6, "save_every": 10**6}
# gpt2-nano's betas and weight decay are those of torch's AdamW where it is told nothing.
OURS = {"adamw": (1.5e-3, 2.2e-3), "muon": (3e-3, 6e-3)}
TRANSFORMERS = (1.5e-3, 2.2e-3)


def documentation() -> Path:
    """The directory with Debian's Spanish documentation as text; fetched where it is not in the cache."""
    program = HERE.parent / "tests/lab/spanish-docs"
    fetched = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True)
    return Path(fetched.stdout.splitlines()[-1])


def prepare_corpus(text: Path, directory: Path) -> Path:
    """The documentation corpus; more of it for validation than usual, so that small differences show."""
    corpus = directory / "corpus"
    command = [sys.executable, "-m", "aura", "prepare", "--input", str(text), "--output", str(corpus)]
    run([*command, "--vocab-size", str(VOCABULARY), "--validation-fraction", "0.05"])
    return corpus


def compare_speed(corpus: Path, size: Size, compiled: bool, repeats: int) -> dict[str, Any]:
    settings = {**QUIET, **size.settings, "compile": str(compiled).lower()}
    both: dict[str, list[Run]] = {"ours": [], "reference": []}
    for repeat in range(repeats):
        turns = (("ours", ours), ("reference", reference))
        for name, loop_of in turns if repeat % 2 == 0 else reversed(turns):
            both[name].append(loop_of(PRESET, corpus, settings))
    config = resolve(PRESET, settings)
    tokens = sum(config.shares(1)) * config.seq_len  # per step
    speeds = {name: [tokens * one.steps_per_second(size.skip) for one in runs] for name, runs in both.items()}
    pairs = list(zip(both["ours"][0].losses[:LOSSES], both["reference"][0].losses[:LOSSES], strict=True))
    differences = [abs(a - b) for a, b in pairs]
    return {
        "size": size.name,
        "compiled": compiled,
        "tokens_per_second": speeds,
        "median": {name: statistics.median(values) for name, values in speeds.items()},
        "losses_compared": len(differences),
        "largest_difference": max(differences),
        "mean_difference": statistics.mean(differences),
        # For scale: how far the loss moves from one step to the next.
        "mean_change_per_step": statistics.mean(abs(b[0] - a[0]) for a, b in pairwise(pairs)),
    }


def compare_learning(corpus: Path) -> list[dict[str, Any]]:
    """Every loop at two learning rates, near the best of more that were tried: each is judged by its best."""
    rows: list[dict[str, Any]] = []
    for optimizer, rates in OURS.items():
        for lr in rates:
            started = time.perf_counter()
            settings = {**LEARNING, **LEARNING_QUIET, "optimizer": optimizer, "lr": lr}
            loss = ours(PRESET, corpus, settings).validation_loss
            seconds = time.perf_counter() - started
            rows.append({"loop": f"ours, {optimizer}", "lr": lr, "validation_loss": loss, "seconds": seconds})
    rates_of_theirs = ["--lr", *map(str, TRANSFORMERS)]
    measured = loop("transformers_loop.py", PRESET, corpus, LEARNING, *rates_of_theirs)
    return rows + [{"loop": "transformers, adamw", **row} for row in measured]


def speed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Speed: tokens/s, medians. Differences of the losses: nats per token")
    for heading in ("model", "mode", "ours", "reference", "ratio", "largest diff.", "mean diff.", "steps"):
        table.add_column(heading, justify="left" if heading in ("model", "mode") else "right")
    for row in rows:
        mine, theirs = row["median"]["ours"], row["median"]["reference"]
        table.add_row(
            row["size"],
            "compiled" if row["compiled"] else "eager",
            f"{mine:,.0f}",
            f"{theirs:,.0f}",
            f"{mine / theirs:.3f}",
            f"{row['largest_difference']:.1e}",
            f"{row['mean_difference']:.1e}",
            str(row["losses_compared"]),
        )
    return table


def learning_table(rows: list[dict[str, Any]]) -> Table:
    config = resolve(PRESET, LEARNING)
    tokens = config.steps * sum(config.shares(1)) * config.seq_len
    table = Table(title=f"Learning: validation loss, nats per token, after {tokens:,} tokens ({PRESET})")
    table.add_column("loop")
    for heading in ("lr", "loss", "lr", "loss", "best", "seconds"):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(row["loop"] for row in rows):
        mine = [row for row in rows if row["loop"] == name]
        cells = [cell for row in mine for cell in (f"{row['lr']:g}", f"{row['validation_loss']:.4f}")]
        seconds = sum(row["seconds"] for row in mine) / len(mine)
        table.add_row(name, *cells, f"{min(row['validation_loss'] for row in mine):.4f}", f"{seconds:.0f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs behind each median (3)")
    parser.add_argument("--only", choices=("speed", "learning"), help="one half of it")
    parser.add_argument(
        "--text", type=Path, metavar="DIR", help="Spanish text (default: fetched from Debian)"
    )
    arguments = parser.parse_args()
    console, started = Console(), time.perf_counter()
    text = arguments.text or documentation()
    results: dict[str, Any] = {"cpus": os.cpu_count(), "speed": [], "learning": []}
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(text, Path(directory))
        if arguments.only != "learning":
            for size in SIZES:
                for compiled in (False, True):
                    console.print(f"{size.name}, {'compiled' if compiled else 'eager'} …")
                    results["speed"].append(compare_speed(corpus, size, compiled, arguments.repeats))
            console.print(speed_table(results["speed"]))
        if arguments.only != "speed":
            console.print("Learning …")
            results["learning"] = compare_learning(corpus)
            console.print(learning_table(results["learning"]))
    results["seconds"] = time.perf_counter() - started
    console.print(f"{results['seconds']:.0f} s; every figure: {write_results('cpu', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
