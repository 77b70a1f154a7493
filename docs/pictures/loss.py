"""`python3 loss.py RUNS PICTURE`: what `make pictures` has trained in the folder RUNS, as curves, with matplotlib.

One PC, five PCs that each do the same amount of work per step, and one PC that does the work of the five alone: the
last two learn the same, so that one curve lies on the other.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt

VOCABULARY = 2048  # of gpt2-nano
CURVES = {  # name of the run: legend, appearance
    "one": ("1 rank, batch 4", {"color": "#b0b0b0", "linewidth": 2}),
    "five": ("5 ranks, batch 4", {"color": "#1f77b4", "linewidth": 5, "alpha": 0.5}),
    "one-large": ("1 rank, batch 20", {"color": "#d62728", "linewidth": 1.2, "linestyle": (0, (4, 2))}),
}


def validation(log: Path) -> tuple[list[int], list[float]]:
    """Steps and their validation losses [nats per token]."""
    with log.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["validation_loss"]]
    return [int(row["step"]) for row in rows], [float(row["validation_loss"]) for row in rows]


def main() -> None:
    runs, picture = Path(sys.argv[1]), Path(sys.argv[2])
    mpl.rcParams |= {
        "svg.hashsalt": "aura",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    _, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    axes.axhline(math.log(VOCABULARY), color="#cccccc", linewidth=1, linestyle=":")
    axes.annotate(f"ln {VOCABULARY}", (300, math.log(VOCABULARY)), ha="right", va="bottom", color="#888888")
    for name, (legend, appearance) in CURVES.items():
        steps, losses = validation(runs / name / "training_log.csv")
        axes.plot(steps, losses, label=f"{legend}: {losses[-1]:.4f}", **appearance)
    axes.set_xlabel("Step")
    axes.set_ylabel("Validation loss (nats/token)")
    axes.legend(frameon=False)
    plt.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
