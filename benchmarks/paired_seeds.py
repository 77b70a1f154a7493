"""`make bench-seeds`: does our AdamW learn what torch's AdamW on transformers' GPT-2 learns? A pair of runs a seed.

`aura train` and reference_loop.py --model paired start with the same weights (ours, which the seed draws) and take the
same windows in the same order, the same schedule, clipping and weight decay; the validation loss is taken on the same
windows. So the two of a pair differ in rounding alone, and their difference says whether that moves what is learnt.

Each pair is written to bench-results/paired-seeds.jsonl as soon as it is measured. What is there is not measured again
as long as settings and corpus are the same, so the command goes on where it was interrupted. The last line is JSON: the
mean of the differences (ours - theirs) with the 95 % interval of Student's t [nats per token], and the largest one.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura.config import as_words
from cpu import LEARNING, LEARNING_QUIET, PRESET, VOCABULARY
from measuring import Kept, Row, corpus_of, interval, options, ours, plain, show


@dataclass(frozen=True)
class Job:
    seed: int
    steps: int

    def settings(self) -> dict[str, Any]:
        return {**LEARNING, "steps": self.steps, "optimizer": "adamw"}

    def key(self, corpus: str) -> str:
        return json.dumps([self.seed, as_words(self.settings()), corpus])


def measure(job: Job, corpus: Path) -> Row:
    """Validation losses [nats per token] of one pair, and what each took [seconds]."""
    settings = job.settings() | {"seed": job.seed}
    mine = ours(PRESET, corpus, {**LEARNING_QUIET, **settings})
    theirs = plain(PRESET, corpus, settings, "paired")
    losses = {"ours": mine.validation_loss, "transformers": theirs.validation_loss}
    return {**losses, "seconds": [mine.took, theirs.took]}


def summary(rows: list[Row]) -> Row:
    """The interval and the spreads need two pairs at least."""
    differences = [row["ours"] - row["transformers"] for row in rows]
    found: Row = {"pairs": len(rows)}
    found |= {name: statistics.mean(row[name] for row in rows) for name in ("ours", "transformers")}
    found |= {"difference": statistics.mean(differences), "largest": max(differences, key=abs)}
    if len(rows) > 1:
        found["interval"] = list(interval(differences))
        found["spread_of_differences"] = statistics.stdev(differences)
        found["spread_over_seeds"] = statistics.stdev(row["ours"] for row in rows)
    return found


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=16, metavar="N", help="how many (16)")
    parser.add_argument(
        "--steps", type=int, default=300, help="optimizer steps (300, the length of the preset)"
    )
    given = parser.parse_args()
    jobs = [Job(seed, given.steps) for seed in range(given.seeds)]
    with corpus_of(given.text, VOCABULARY) as corpus:
        kept = Kept(Path("bench-results", "paired-seeds.jsonl"), corpus, measure)
        kept.results(jobs)
    same = {"settings": as_words(jobs[0].settings()), "corpus": kept.fingerprint}
    # All pairs that were measured in this way, now or before
    of_seeds = [(row, Job(row["seed"], row["steps"])) for row in kept.known.values()]
    rows = [
        row for row, job in of_seeds if row["key"] == job.key(kept.fingerprint) and job.steps == given.steps
    ]
    rows.sort(key=lambda row: row["seed"])
    pairs = [(row["seed"], row["ours"], row["transformers"]) for row in rows]
    show(
        f"Validation loss, nats per token ({PRESET}, adamw)",
        ("seed", "ours", "transformers", "difference"),
        [(str(seed), f"{a:.5f}", f"{b:.5f}", f"{a - b:+.5f}") for seed, a, b in pairs],
    )
    print(json.dumps({**same, **summary(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
