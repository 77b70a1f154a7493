"""How what few bits and a delay cost changes with a model's size and with the length of its run.

    python benchmarks/ladder.py --text DIR --rungs 0.5M:900 0.5M:2700 2M:900 2M:2700 8M:900

On a card, as many minutes as rungs, or twice (all arms and seeds of a rung at once: lanes.py); on two cores,
days. The text needs 1,280 tokens a step, of about two bytes each. Every rung also says what two other learning rates
would do. What a straight line over the logarithms of size and length says far beyond them is a guess, and how far that
is stands beside it. Every rung is a line in bench-results/ladder.jsonl.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import Corpus, read_corpus
from aura.corpus.sequences import Sequences
from aura.model.gpt import GPT
from lanes import Lane, train
from learning_arms import INT4_LATE, MODEL, SCHEDULE, VOCABULARY, WARMUP
from measuring import Row, corpus_of, interval, options, show
from playing import Setting

MEDIUM, ITS_STEPS = 354_823_168, 19_000  # gpt2-medium, and ten billion tokens at half a million a step
# The rates of the first three: the best of five at 900 steps (seed 0); those of the others follow.
SIZES = {
    "0.13M": {"layers": 2, "d_model": 64, "heads": 2, "lr": 1.4e-2},
    "0.5M": {"layers": 4, "d_model": 96, "heads": 3, "lr": 1e-2},
    "2M": {"layers": 6, "d_model": 160, "heads": 5, "lr": 7e-3},
    "8M": {"layers": 8, "d_model": 288, "heads": 9, "lr": 5e-3},
    "31M": {"layers": 10, "d_model": 512, "heads": 16, "lr": 3.5e-3},
}
ARMS = {
    "int4": Setting("int4", "int4"),
    "int4, late after 1/4": replace(INT4_LATE, after=0.25),
    "int4, late after 1/10": replace(INT4_LATE, after=0.1),
}
OTHER_RATES = (0.7, 1.4)
VALIDATION = 0.03  # of the text


@dataclass(frozen=True)
class Rung:
    """Models of one size, trained for so many steps."""

    size: str
    parameters: int
    steps: int
    lr: float
    loss: float  # of the synchronous arm, mean of the seeds
    costs: dict[str, list[float]]  # of every arm and seed: how much more loss [nats per token]
    other_rates: list[float]  # the same of the synchronous arm at these

    def cells(self) -> list[str]:
        words = [self.size, str(self.steps), f"{self.lr:g}", f"{self.loss:.4f}"]
        words.append(", ".join(f"{cost:+.4f}" for cost in self.other_rates))
        for costs in self.costs.values():
            low, high = interval(costs)
            words.append(f"{statistics.mean(costs):+.4f} ± {(high - low) / 2:.4f}")
        return words

    def summary(self) -> Row:
        upper = {arm: interval(costs)[1] for arm, costs in self.costs.items()}
        return {**vars(self), "upper_95": upper}


@dataclass(frozen=True)
class Trend:
    """cost = scale · parameters^by_size · steps^by_length, by least squares over the logarithms of the means."""

    scale: float
    by_size: float
    by_length: float

    def at(self, parameters: float, steps: float) -> float:
        return self.scale * parameters**self.by_size * steps**self.by_length


def trend(rungs: Sequence[Rung], arm: str) -> Trend | None:
    """None where an arm costs nothing on one of the rungs, or where they do not differ in both."""
    means = [statistics.mean(rung.costs[arm]) for rung in rungs]
    rows = [(1.0, math.log(rung.parameters), math.log(rung.steps)) for rung in rungs]
    if min(means) <= 0 or np.linalg.matrix_rank(rows) < 3:
        return None
    (scale, by_size, by_length), *_ = np.linalg.lstsq(np.array(rows), np.log(means), rcond=None)
    return Trend(math.exp(scale), float(by_size), float(by_length))


def config_of(size: str, steps: int) -> TrainConfig:
    own = {"optimizer": "muon", "steps": steps, "warmup_steps": round(steps * WARMUP["muon"] / 300)}
    return resolve("gpt2-nano", {**MODEL, **SIZES[size], **SCHEDULE, **own})


def climbed(size: str, steps: int, corpus: Corpus, seeds: int, device: str) -> Rung:
    config = config_of(size, steps)
    lanes = [Lane(Setting(), 0, rate) for rate in OTHER_RATES]
    lanes += [Lane(setting, seed) for setting in (Setting(), *ARMS.values()) for seed in range(seeds)]
    train_on, validate_on = (Sequences(corpus, split, config.seq_len) for split in ("train", "validation"))
    losses = train(config, lanes, train_on, validate_on, device)
    others, losses = losses[: len(OTHER_RATES)], losses[len(OTHER_RATES) :]
    synchronous, *found = (losses[start : start + seeds] for start in range(0, len(losses), seeds))
    costs = [[loss - exact for loss, exact in zip(arm, synchronous, strict=True)] for arm in found]
    return Rung(
        size,
        GPT(config, "meta").parameter_count(),
        steps,
        config.lr,
        statistics.mean(synchronous),
        dict(zip(ARMS, costs, strict=True)),
        [loss - synchronous[0] for loss in others],
    )


def show_ladder(rungs: Sequence[Rung], seeds: int) -> None:
    title = f"What an arm costs beside the synchronous one, nats per token, 95 %; Muon, {seeds} seeds"
    at = " and ".join(f"{rate:g}" for rate in OTHER_RATES)
    headings = ("size", "steps", "lr", "loss", f"at {at} times the rate", *ARMS)
    show(title, headings, [rung.cells() for rung in rungs], left=("size",))
    for arm in ARMS:
        if line := trend(rungs, arm):
            far = MEDIUM / max(rung.parameters for rung in rungs)
            print(
                f"{arm}: twice the parameters make the cost {2**line.by_size:.2f} times as large, twice the steps "
                f"{2**line.by_length:.2f} times. On that line gpt2-medium, {far:.0f} times larger than the largest "
                f"model here, loses {line.at(MEDIUM, ITS_STEPS):+.4f} in {ITS_STEPS} steps."
            )


def main() -> int:
    parser = options(__doc__)
    add = parser.add_argument
    add("--rungs", nargs="+", default=["0.13M:300"], metavar="SIZE:STEPS", help=f"of {', '.join(SIZES)}")
    add("--seeds", type=int, default=5, metavar="N", help="paired seeds (5)")
    given = parser.parse_args()
    wanted = []
    for rung in given.rungs:
        size, _, steps = rung.partition(":")
        if size not in SIZES or not steps.isdecimal():
            parser.error(f"--rungs {rung}: SIZE:STEPS, with a size of {', '.join(SIZES)}")
        wanted.append((size, int(steps)))
    device, rungs = "cuda" if torch.cuda.is_available() else "cpu", []
    torch.set_float32_matmul_precision("high")
    results = Path("bench-results/ladder.jsonl")
    results.parent.mkdir(exist_ok=True)
    with corpus_of(given.text, VOCABULARY, VALIDATION) as directory:
        corpus = read_corpus(directory)
        has = len(Sequences(corpus, "train", MODEL["seq_len"])) // Setting().sequences
        if (longest := max(steps for _, steps in wanted)) > has:
            sys.exit(
                f"One pass over this text is {has} steps, {longest} are asked for: more text is needed (--text DIR)."
            )
        for size, steps in wanted:
            began = time.perf_counter()
            rungs.append(climbed(size, steps, corpus, given.seeds, device))
            print(f"{size}, {steps} steps: {time.perf_counter() - began:.0f} s", flush=True)
            with results.open("a", encoding="utf-8") as out:
                out.write(json.dumps(rungs[-1].summary()) + "\n")
    show_ladder(rungs, given.seeds)
    about = {"bench": "ladder", "seeds": given.seeds, "device": device}
    print(json.dumps({**about, "sizes": [rung.summary() for rung in rungs]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
