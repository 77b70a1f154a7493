"""`python benchmarks/hrm.py`: what the hierarchy of HRM-Text is worth, on very small models and the CPU.

Beside HRM-Text train, on the same windows in the same order: its own blocks, each of them called once (as many
parameters), more of them (as many FLOP per token), and GPT-2 in both sizes. So the first two say what calling the
blocks again is worth, the last two what the whole model is worth against the one that Aura has anyway. Every arm takes
the best of its learning rates, by the mean over the seeds.

Every run is a line in bench-results/hrm.jsonl, and what is there already is not computed again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import read_corpus
from aura.corpus.windows import Order, Windows, inputs_and_targets
from aura.model.family import model_of
from aura.model.forward import validation_loss
from aura.model.hrm_text import HrmText, norm
from aura.model.language_model import LanguageModel
from aura.optim.schedule import learning_rate
from aura.plan.flops import flops_per_token
from aura.plan.shapes import parameter_count, shape_of
from aura.strategy.alone import Alone
from aura.strategy.interface import Told
from loops import prepare_corpus, spanish_text
from rich.console import Console
from rich.table import Table
from torch import Tensor

VOCABULARY = 512
MODEL = {"heads": 4, "d_model": 64, "seq_len": 64, "vocab_size": VOCABULARY, "batch_size": 16}
SCHEDULE = {"min_lr_ratio": 0.0, "beta2": 0.95, "validation_windows": 400}
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


@dataclass(frozen=True)
class Arm:
    family: str
    layers: int
    once: bool = False  # the blocks of HRM-Text one after another, each called once


ARMS = {
    "HRM-Text": Arm("hrm-text", 2),
    "its blocks once, as many parameters": Arm("hrm-text", 2, once=True),
    "its blocks once, as many FLOP": Arm("hrm-text", 6, once=True),
    "GPT-2, as many parameters": Arm("gpt2", 3),
    "GPT-2, as many FLOP": Arm("gpt2", 8),
}


@dataclass(frozen=True)
class Job:
    arm: str
    lr: float
    seed: int
    steps: int

    def config(self) -> TrainConfig:
        arm = ARMS[self.arm]
        own = {"family": arm.family, "layers": arm.layers, "lr": self.lr, "seed": self.seed}
        length = {"steps": self.steps, "warmup_steps": self.steps // 5}
        return resolve("gpt2-nano", {**MODEL, **SCHEDULE, **own, **length})


class Once(HrmText):
    def before_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotation(tokens.shape[1], tokens.device)
        x = self.embed_tokens(tokens) * self.d_model**0.5
        for block in [*self.L_module.layers, *self.H_module.layers]:
            x = block(x, cos, sin)
        return norm(x), self.lm_head()


def model_for(job: Job) -> LanguageModel:
    return Once(job.config()) if ARMS[job.arm].once else model_of(job.config())


def flops(job: Job) -> int:
    """Per token, forward and backward, the mean over the run."""
    config = job.config()
    if not ARMS[job.arm].once:
        return flops_per_token(config)
    block = 2 * shape_of(config).in_matrices + 4 * config.d_model * config.seq_len
    return 3 * config.layers * block + 6 * config.vocab_size * config.d_model


def compute(job: Job, corpus: Path) -> dict[str, Any]:
    """The validation loss at the end [nats per token], and how long it took [s]; in a process of the pool."""
    began, config, opened = time.perf_counter(), job.config(), read_corpus(corpus)
    train, validation = (Windows(opened, split, config.seq_len) for split in ("train", "validation"))
    model, order = model_for(job), Order(len(train), config.seed)
    strategy = Alone(model, config)
    for step in range(config.steps):
        tokens = train.batch(order.at(step * config.batch_size, config.batch_size))
        strategy.begin_step()
        model.begin_step(step, config.steps)
        with strategy.last_backward():
            loss = model.loss_sum(*inputs_and_targets(tokens))
            loss.backward()  # type: ignore[no-untyped-call]
        outcome = strategy.apply(
            Told(loss.detach(), config.batch_size * config.seq_len), learning_rate(config, step)
        )()
        assert not outcome.left_out
    device = torch.device("cpu")
    found = validation_loss(model, validation, config, Ranks(0, ["node"], device), device)
    return {"loss": found, "seconds": time.perf_counter() - began}


def measure(jobs: Sequence[Job], corpus: Path, file: Path, workers: int, console: Console) -> dict[Job, Any]:
    """Of every job what `compute` says."""
    fingerprint = read_corpus(corpus).fingerprint
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = {row["key"]: row for row in map(json.loads, lines)}

    def key(job: Job) -> str:
        return json.dumps([job.config().digest(), asdict(ARMS[job.arm]), fingerprint])

    missing = [job for job in jobs if key(job) not in known]
    # One thread for each: the matrices are too small for more.
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        results = pool.map(compute, missing, [corpus] * len(missing))
        for number, (job, row) in enumerate(zip(missing, results, strict=True), 1):
            row = known[key(job)] = {**asdict(job), **row, "key": key(job)}
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            said = f"{job.arm}, lr {job.lr:g}, seed {job.seed}: {row['loss']:.4f} ({row['seconds']:.0f} s)"
            console.print(f"{number}/{len(missing)} {said}", highlight=False)
    return {job: known[key(job)] for job in jobs}


def summaries(found: dict[Job, Any]) -> list[dict[str, Any]]:
    """Of every arm, at the best of its learning rates."""
    made = []
    for arm in ARMS:
        losses: dict[float, list[float]] = {}
        for job, row in found.items():
            if job.arm == arm:
                losses.setdefault(job.lr, []).append(row["loss"])
        best = min(losses, key=lambda lr: statistics.mean(losses[lr]))
        job = next(job for job in found if (job.arm, job.lr) == (arm, best))
        made.append(
            {
                "arm": arm,
                "parameters": parameter_count(job.config()),
                "flops_per_token": flops(job),
                "lr": best,
                "losses": losses[best],
                "mean": statistics.mean(losses[best]),
                "tried": {lr: statistics.mean(of_lr) for lr, of_lr in losses.items()},
            }
        )
    return made


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="Validation loss, nats per token")
    for heading in ("arm", "parameters", "MFLOP per token", "lr", "loss", "of every seed", "other rates"):
        shown.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in rows:
        others = (f"{lr:g}: {loss:.4f}" for lr, loss in row["tried"].items() if lr != row["lr"])
        shown.add_row(
            row["arm"],
            f"{row['parameters']:,}",
            f"{row['flops_per_token'] / 1e6:.2f}",
            f"{row['lr']:g}",
            f"{row['mean']:.4f}",
            ", ".join(f"{loss:.4f}" for loss in row["losses"]),
            ", ".join(others),
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of 1,024 tokens (400)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="paired seeds (2)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="runs at a time (2)")
    parser.add_argument(
        "--text", type=Path, metavar="DIR", help="Spanish text (default: fetched from Debian)"
    )
    parser.add_argument("--results", type=Path, default=Path("bench-results/hrm.jsonl"), metavar="FILE")
    given = parser.parse_args()
    console, began = Console(), time.perf_counter()
    # Seed by seed, and rate by rate: who stops it has whole comparisons.
    jobs = [Job(arm, lr, seed, given.steps) for seed in range(given.seeds) for lr in RATES for arm in ARMS]
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(given.text or spanish_text(), Path(directory), VOCABULARY)
        rows = summaries(measure(jobs, corpus, given.results, given.workers, console))
    console.print(table(rows))
    seconds = round(time.perf_counter() - began)
    print(
        json.dumps(
            {"bench": "hrm", "steps": given.steps, "seeds": given.seeds, "seconds": seconds, "arms": rows}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
