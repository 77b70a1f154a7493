"""`make bench-seeds`: does our AdamW learn what torch's AdamW on transformers' GPT-2 learns? A pair of runs a seed.

`aura train` and transformers_loop.py --paired start with the same weights (ours, which the seed draws) and take the
same windows in the same order, the same schedule, clipping and weight decay; the validation loss is taken on the same
windows. So the two of a pair differ in rounding alone, and their difference says whether that moves what is learnt.

Each pair is written to bench-results/paired-seeds.jsonl as soon as it is measured. What is there is not measured again
as long as settings and corpus are the same, so the command goes on where it was interrupted. The last line is JSON: the
mean of the differences (ours - theirs) with the 95 % interval of Student's t [nats per token], and the largest one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any

from aura.config import as_words
from aura.corpus.corpus import read_corpus
from cpu import LEARNING, LEARNING_QUIET, PRESET, VOCABULARY
from loops import loop, ours, prepare_corpus, spanish_text
from rich.console import Console
from rich.table import Table

RESULTS = Path("bench-results", "paired-seeds.jsonl")
Row = dict[str, Any]


def measure(corpus: Path, settings: dict[str, Any]) -> Row:
    """Validation losses [nats per token] of one pair, and what each took [seconds]."""
    started = time.perf_counter()
    mine = ours(PRESET, corpus, {**LEARNING_QUIET, **settings}).validation_loss
    between = time.perf_counter()
    theirs = loop("transformers_loop.py", PRESET, corpus, settings, "--paired")[0]["validation_loss"]
    seconds = [between - started, time.perf_counter() - between]
    return {"ours": mine, "transformers": theirs, "seconds": seconds}


def read(same: Row) -> list[Row]:
    """The pairs that were measured with the same settings on the same corpus, by seed."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = [row for row in map(json.loads, lines) if same.items() <= row.items()]
    return sorted(rows, key=lambda row: row["seed"])


def student(freedom: int, probability: float = 0.975) -> float:
    """The quantile of Student's t (Abramowitz and Stegun, 26.7.5), to five digits from 15 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def summary(rows: list[Row]) -> Row:
    """The interval's half-width and the spreads need two pairs at least."""
    differences = [row["ours"] - row["transformers"] for row in rows]
    found: Row = {"pairs": len(rows)}
    for name in ("ours", "transformers"):
        found[name] = statistics.mean(row[name] for row in rows)
    found |= {"difference": statistics.mean(differences), "largest": max(differences, key=abs)}
    if len(rows) > 1:
        spread = statistics.stdev(differences)
        half = student(len(rows) - 1) * spread / len(rows) ** 0.5
        found["interval"] = [found["difference"] - half, found["difference"] + half]
        found["spread_of_differences"] = spread
        found["spread_over_seeds"] = statistics.stdev(row["ours"] for row in rows)
    return found


def table(rows: list[Row], settings: str) -> Table:
    shown = Table(title=f"Validation loss, nats per token ({PRESET}, adamw)", caption=settings)
    for heading in ("seed", "ours", "transformers", "difference"):
        shown.add_column(heading, justify="right")
    for row in rows:
        mine, theirs = row["ours"], row["transformers"]
        shown.add_row(str(row["seed"]), f"{mine:.5f}", f"{theirs:.5f}", f"{mine - theirs:+.5f}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=16, metavar="N", help="how many (16)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (0)")
    parser.add_argument(
        "--steps", type=int, default=300, help="optimizer steps (300, the length of the preset)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="DIR", help="Spanish text (default: fetched from Debian)"
    )
    arguments = parser.parse_args()
    console = Console()
    settings = {**LEARNING, "steps": arguments.steps, "optimizer": "adamw"}
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(arguments.text or spanish_text(), Path(directory), VOCABULARY)
        same = {"settings": as_words(settings), "corpus": read_corpus(corpus).fingerprint}
        measured = {row["seed"] for row in read(same)}
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            if seed in measured:
                continue
            row = {"seed": seed, **same, **measure(corpus, {**settings, "seed": seed})}
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            console.print(f"Seed {seed}: {row['ours']:.5f}, transformers {row['transformers']:.5f}")
    rows = read(same)
    console.print(table(rows, same["settings"]))
    print(json.dumps({**same, **summary(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
