"""`make bench-modern`: what today's recipe is worth, and each of its ingredients, on very small models.

Qwen3 as its presets train it, GPT-2 with AdamW as its preset does, GPT-2 with the recipe, and Qwen3 with one ingredient
left out at a time. All have about half a million parameters and take as many floating-point operations for their tokens
(those of Muon's updates are not in it: here three fifths more, in the presets' steps less than a hundredth). Each arm
takes the best of four learning rates or more, by its first seed; then five seeds (initial weights and order of the
text) are compared in pairs, in bits per byte of the validation text: mean and 95 % interval (Student's t).

How many tokens today's recipe needs for the last loss of GPT-2 with AdamW is between runs of its own that end earlier.

Every run is a line in bench-results/modern.jsonl, and what is there already is not computed again: the command goes on
where it was stopped. Forty minutes on two idle cores. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import Corpus, read_corpus
from aura.corpus.sequences import Order, Sequences, inputs_and_targets
from aura.corpus.text_bytes import bits_per_byte
from aura.model.forward import validation_loss
from aura.model.language_model import LanguageModel
from aura.optim.schedule import learning_rate
from aura.plan.flops import flops_per_token, update_flops
from aura.strategy.alone import Alone
from aura.strategy.interface import LocalStepStats
from measuring import Kept, Row, corpus_of, interval, options_of_jobs, part_until, show
from modern_arms import ARMS, FINER, HERE, MODERN, SIZE, TODAY, model_for

STEPS = 300  # of GPT-2; an arm whose token is less work takes more of them
PARTS = (0.15, 0.25, 0.4)  # of the tokens, until the loss of GPT-2

Bits = Callable[..., list[list[float]]]  # of an arm, by rate and seed, after a part of the tokens


@dataclass(frozen=True)
class Job:
    arm: str
    lr: float
    seed: int
    part: float = 1.0  # of the tokens

    def settings(self) -> Row:
        arm = ARMS[self.arm]
        own = {name: ratio * self.lr for name, ratio in arm.own_rates.items()}
        groups = {"kv_heads": 2} if arm.preset.startswith("qwen3") else {}
        return {**SIZE, **HERE, **groups, **own, **arm.settings, "lr": self.lr, "seed": self.seed}

    def config(self) -> TrainConfig:
        arm = ARMS[self.arm]
        budget = STEPS * flops_per_token(resolve("gpt2", {**SIZE, **HERE}))
        steps = round(self.part * budget / flops_per_token(resolve(arm.preset, self.settings())))
        return resolve(arm.preset, {**self.settings(), "steps": steps})

    def key(self, corpus: str) -> str:
        return json.dumps([self.config().digest(), ARMS[self.arm].variant, corpus])


def compute(job: Job, corpus: Path) -> Row:
    """The validation loss at the end [bits per byte], the model's size, and how long it took [s]."""
    began, config, opened = time.perf_counter(), job.config(), read_corpus(corpus)
    model = model_for(ARMS[job.arm], config)
    bits = bits_per_byte(opened, print).whole
    found = bits * trained(model, config, opened)
    size = {"parameters": model.parameter_count(), "steps": config.steps}
    return {"bits_per_byte": found, **size, "seconds": round(time.perf_counter() - began, 1)}


def trained(model: LanguageModel, config: TrainConfig, corpus: Corpus) -> float:
    """In this process, on its CPU: the validation loss at the end [nats per token]; batch_size sequences a step."""
    train, validation = (Sequences(corpus, split, config.seq_len) for split in ("train", "validation"))
    order, tokens = Order(len(train), config.seed), config.batch_size * config.seq_len
    strategy = Alone(model, config)
    for step in range(config.steps):
        batch = train.batch(order.at(step * config.batch_size, config.batch_size))
        strategy.begin_step()
        model.begin_step(step, config.steps)
        with strategy.last_backward():
            loss = model.loss_sum(*inputs_and_targets(batch))
            loss.backward()  # type: ignore[no-untyped-call]
        outcome = strategy.apply(LocalStepStats(loss.detach(), tokens), learning_rate(config, step))()
        assert not outcome.left_out
    device = torch.device("cpu")
    return validation_loss(model, validation, config, Ranks(0, ["node"], device), device).whole


def work(job: Job) -> float:
    """FLOP of a step with its update."""
    config = job.config()
    return config.batch_size * config.seq_len * flops_per_token(config) + update_flops(config)


def tune(arm: str, bits: Bits) -> dict[float, float]:
    """By rate, the first seed's loss; beyond the rates of the arm, where the best would be the first or the last."""
    tried: dict[float, float] = {}
    missing = list(ARMS[arm].rates)
    while missing:
        tried |= {lr: loss for lr, (loss,) in zip(missing, bits(arm, missing, range(1)), strict=True)}
        best = min(tried, key=tried.__getitem__)
        beyond = {min(tried): best / FINER, max(tried): best * FINER}
        missing = [beyond[best]] if best in beyond else []
    return tried


def measure(arm: str, bits: Bits, seeds: int) -> Row:
    """At the best of its rates."""
    tried = tune(arm, bits)
    best = min(tried, key=tried.__getitem__)
    (found,) = bits(arm, [best], range(seeds))
    figures = {"bits_per_byte": statistics.mean(found), "of_seeds": found, "tried": tried}
    return {"arm": arm, "lr": best, **figures}


def with_differences(rows: list[Row]) -> list[Row]:
    reference = next(row for row in rows if row["arm"] == MODERN)
    for row in rows:
        pairs = zip(row["of_seeds"], reference["of_seeds"], strict=True)
        differences = [one - other for one, other in pairs]
        low, high = interval(differences)
        row |= {"difference": statistics.mean(differences), "lower_95": low, "upper_95": high}
    return rows


def cells(row: Row) -> list[str]:
    tried = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in sorted(row["tried"].items()))
    half = (row["upper_95"] - row["lower_95"]) / 2
    difference = "–" if row["arm"] == MODERN else f"{row['difference']:+.3f} ± {half:.3f}"
    return [row["arm"], f"{row['lr']:g}", f"{row['bits_per_byte']:.3f}", difference, tried]


def until_today(rows: list[Row], bits: Bits, seeds: int) -> Row:
    """The part of GPT-2's tokens, and of its work, after which MODERN has its last loss."""
    today, modern = (next(row for row in rows if row["arm"] == arm) for arm in (TODAY, MODERN))
    of_parts = {part: statistics.mean(bits(MODERN, [modern["lr"]], range(seeds), part)[0]) for part in PARTS}
    part = part_until(today["bits_per_byte"], of_parts)
    one, other = Job(MODERN, modern["lr"], 0), Job(TODAY, today["lr"], 0)
    tokens = part * one.config().steps / other.config().steps
    return {"parts": of_parts, "tokens": tokens, "flop": tokens * work(one) / work(other)}


def main() -> int:
    parser = options_of_jobs(__doc__, "modern", os.cpu_count())
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="paired seeds (5)")
    given, began = parser.parse_args(), time.perf_counter()
    with (
        corpus_of(given.text, SIZE["vocab_size"]) as corpus,
        closing(Kept(given.results, corpus, compute, given.workers)) as kept,
    ):

        def bits(arm: str, rates: Sequence[float], seeds: range, part: float = 1.0) -> list[list[float]]:
            found = kept.results([Job(arm, lr, seed, part) for lr in rates for seed in seeds])
            losses = [row["bits_per_byte"] for row in found]
            return [losses[first : first + len(seeds)] for first in range(0, len(losses), len(seeds))]

        # Arm by arm, those first that are asked about most: who stops it has whole ones.
        rows = [measure(arm, bits, given.seeds) for arm in (MODERN, TODAY)]
        until = until_today(rows, bits, given.seeds)
        rows += [measure(arm, bits, given.seeds) for arm in ARMS if arm not in (MODERN, TODAY)]
    rows = with_differences(rows)
    title = f"Validation loss, bits per byte; differences to {MODERN}, {given.seeds} seeds"
    show(title, ("arm", "lr", "bits per byte", "difference", "rates tried"), map(cells, rows), left=("arm",))
    print(
        f"the last loss of {TODAY} after {until['tokens']:.3f} of its tokens, {until['flop']:.3f} of its FLOP"
    )
    about = {"bench": "modern", "seeds": given.seeds, "evidence": "cpu", "steps": STEPS}
    seconds = round(time.perf_counter() - began)
    print(json.dumps({**about, "seconds": seconds, "arms": rows, "until": until}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
