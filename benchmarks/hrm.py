"""`python benchmarks/hrm.py`: what the hierarchy of HRM-Text is worth, on very small models and the CPU.

Beside HRM-Text train, on the same windows in the same order: its own blocks, each of them called once (as many
parameters), more of them (as many FLOP per token), and GPT-2 in both sizes. So the first two say what calling the
blocks again is worth, the last two what the whole model is worth against the one that Aura has anyway. Every arm takes
the best of its learning rates, by the mean over the seeds.

Every run is a line in bench-results/hrm.jsonl, and what is there already is not computed again. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from aura.config import TrainConfig, resolve
from aura.corpus.corpus import read_corpus
from aura.families.hrm_text import THETA
from aura.model.family import model_of
from aura.model.hrm_text import HrmText, norm
from aura.model.language_model import LanguageModel
from aura.model.layers import rotation
from aura.plan.flops import flops_per_token
from aura.plan.shapes import parameter_count, shape_of
from measuring import Kept, Row, corpus_of, options_of_jobs, show
from one_process import trained
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

    def key(self, corpus: str) -> str:
        return json.dumps([self.config().digest(), asdict(ARMS[self.arm]), corpus])


class Once(HrmText):
    def before_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotation(tokens.shape[1], self.head_width, THETA, tokens.device)
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


def compute(job: Job, corpus: Path) -> Row:
    """The validation loss at the end [nats per token], and how long it took [s]."""
    began = time.perf_counter()
    found = trained(model_for(job), job.config(), read_corpus(corpus))
    return {"loss": found, "seconds": time.perf_counter() - began}


def summary(arm: str, jobs: list[Job], losses: list[float]) -> Row:
    """At the best of its learning rates."""
    of_rates: dict[float, list[float]] = {}
    for job, loss in zip(jobs, losses, strict=True):
        if job.arm == arm:
            of_rates.setdefault(job.lr, []).append(loss)
    tried = {lr: statistics.mean(of_lr) for lr, of_lr in of_rates.items()}
    best = min(tried, key=tried.__getitem__)
    job = next(job for job in jobs if (job.arm, job.lr) == (arm, best))
    size = {"parameters": parameter_count(job.config()), "flops_per_token": flops(job)}
    return {"arm": arm, **size, "lr": best, "losses": of_rates[best], "mean": tried[best], "tried": tried}


def cells(row: Row) -> list[str]:
    others = (f"{lr:g}: {loss:.4f}" for lr, loss in row["tried"].items() if lr != row["lr"])
    size = [f"{row['parameters']:,}", f"{row['flops_per_token'] / 1e6:.2f}", f"{row['lr']:g}"]
    losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
    return [row["arm"], *size, f"{row['mean']:.4f}", losses, ", ".join(others)]


def main() -> int:
    parser = options_of_jobs(__doc__, "hrm", 2)
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of 1,024 tokens (400)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="paired seeds (2)")
    given, began = parser.parse_args(), time.perf_counter()
    # Seed by seed, and rate by rate: who stops it has whole comparisons.
    jobs = [Job(arm, lr, seed, given.steps) for seed in range(given.seeds) for lr in RATES for arm in ARMS]
    with corpus_of(given.text, VOCABULARY) as corpus:
        found = Kept(given.results, corpus, compute, given.workers).results(jobs)
    rows = [summary(arm, jobs, [row["loss"] for row in found]) for arm in ARMS]
    headings = ("arm", "parameters", "MFLOP per token", "lr", "loss", "of every seed", "other rates")
    show("Validation loss, nats per token", headings, map(cells, rows), left=("arm",))
    about = {"steps": given.steps, "seeds": given.seeds, "seconds": round(time.perf_counter() - began)}
    print(json.dumps({"bench": "hrm", **about, "arms": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
