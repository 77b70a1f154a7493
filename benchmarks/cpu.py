"""`make bench`: our loop against two others on this machine's CPU, in one run.

Speed: tokens/s of `aura train` and of reference_loop.py, eager and compiled, at two sizes. The two take turns, and each
figure is the median of the repetitions. Their losses are compared step by step.
Learning: validation loss of `aura train` and of transformers' GPT-2 in that loop after equal tokens of Spanish text.

At most ten minutes on two cores. The table goes to the terminal, every figure to bench-results/cpu.json.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from aura.config import resolve
from measuring import QUIET, Row, Run, Settings, corpus_of, options, ours, plain, show, write_results

PRESET = "gpt2-nano"
VOCABULARY = 2048
REPEATS = 3  # runs behind each median
# Settings after the preset's, and how many steps at the beginning are not timed
SIZES: dict[str, tuple[Settings, int]] = {
    "gpt2-nano: 2 x 128, seq 128": ({"steps": 200}, 40),
    "4 x 256, seq 256": (
        {"layers": 4, "d_model": 256, "heads": 4, "seq_len": 256, "steps": 40, "lr": 2e-3},
        10,
    ),
}
# One epoch of the documentation corpus.
LEARNING = {"steps": 750, "batch_size": 8, "warmup_steps": 40, "validation_windows": 400}
# Every loop at two learning rates, near the best of more that were tried: each is judged by its best. gpt2-nano's betas
# and weight decay are those of torch's AdamW where it is told nothing.
RATES = {"ours, adamw": (1.5e-3, 2.2e-3), "ours, muon": (3e-3, 6e-3), "transformers, adamw": (1.5e-3, 2.2e-3)}


def compare_speed(corpus: Path, name: str, compiled: bool) -> Row:
    (of_size, skip), loops = SIZES[name], {"ours": ours, "reference": plain}
    settings = {**QUIET, **of_size, "compile": str(compiled).lower()}
    both: dict[str, list[Run]] = {loop: [] for loop in loops}
    for repeat in range(REPEATS):
        for loop in list(loops) if repeat % 2 == 0 else reversed(list(loops)):
            both[loop].append(loops[loop](PRESET, corpus, settings))
    config = resolve(PRESET, settings)
    tokens = sum(config.shares(1)) * config.seq_len  # per step
    speeds = {loop: [tokens * one.steps_per_second(skip) for one in runs] for loop, runs in both.items()}
    pairs = zip(*(runs[0].losses for runs in both.values()), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return {
        "size": name,
        "compiled": compiled,
        "tokens_per_second": speeds,
        "median": {loop: statistics.median(values) for loop, values in speeds.items()},
        "losses_compared": len(differences),
        "largest_difference": max(differences),
        "mean_difference": statistics.mean(differences),
    }


def compare_learning(corpus: Path) -> list[Row]:
    rows: list[Row] = []
    for loop, rates in RATES.items():
        for lr in rates:
            settings = {**LEARNING, "lr": lr}
            if loop.startswith("ours"):
                own = {**QUIET, **settings, "optimizer": loop.removeprefix("ours, ")}
                found = ours(PRESET, corpus, own)
            else:
                found = plain(PRESET, corpus, settings, "transformers")
            figures = {"validation_loss": found.validation_loss, "seconds": found.took}
            rows.append({"loop": loop, "lr": lr, **figures})
    return rows


def show_speed(rows: list[Row]) -> None:
    headings = ("model", "mode", "ours", "reference", "ratio", "largest diff.", "mean diff.", "steps")
    cells = []
    for row in rows:
        mine, theirs = row["median"].values()
        differences = (f"{row[f'{kind}_difference']:.1e}" for kind in ("largest", "mean"))
        speeds = (f"{mine:,.0f}", f"{theirs:,.0f}", f"{mine / theirs:.3f}")
        mode = "compiled" if row["compiled"] else "eager"
        cells.append((row["size"], mode, *speeds, *differences, str(row["losses_compared"])))
    title = "Speed: tokens/s, medians. Differences of the losses: nats per token"
    show(title, headings, cells, left=("model", "mode"))


def show_learning(rows: list[Row]) -> None:
    config, cells = resolve(PRESET, LEARNING), []
    for loop in RATES:
        mine = [row for row in rows if row["loop"] == loop]
        losses = [cell for row in mine for cell in (f"{row['lr']:g}", f"{row['validation_loss']:.4f}")]
        best = min(row["validation_loss"] for row in mine)
        seconds = statistics.mean(row["seconds"] for row in mine)
        cells.append((loop, *losses, f"{best:.4f}", f"{seconds:.0f}"))
    tokens = config.steps * sum(config.shares(1)) * config.seq_len
    title = f"Learning: validation loss, nats per token, after {tokens:,} tokens ({PRESET})"
    show(title, ("loop", "lr", "loss", "lr", "loss", "best", "seconds"), cells, left=("loop",))


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("speed", "learning"), help="one half of it")
    given, started = parser.parse_args(), time.perf_counter()
    results: dict[str, Any] = {"cpus": os.cpu_count(), "speed": [], "learning": []}
    with corpus_of(given.text, VOCABULARY) as corpus:
        if given.only != "learning":
            for name in SIZES:
                for compiled in (False, True):
                    print(f"{name}, {'compiled' if compiled else 'eager'} …", flush=True)
                    results["speed"].append(compare_speed(corpus, name, compiled))
            show_speed(results["speed"])
        if given.only != "speed":
            print("Learning …", flush=True)
            results["learning"] = compare_learning(corpus)
            show_learning(results["learning"])
    results["seconds"] = time.perf_counter() - started
    print(f"{results['seconds']:.0f} s; every figure: {write_results('cpu', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
