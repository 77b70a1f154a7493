"""What fewer bits and a delay cost in loss, and who has measured it. Standard library only.

Losses are in nats per token, above the same run without delay in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from aura.config import TrainConfig
from aura.plan.shapes import parameter_count
from aura.texts.console import text

# Whom we trust, the best first; the words are in aura/texts.
TRUST = OURS_GPU, PUBLISHED, OURS_CPU = "evidence_gpu", "evidence_published", "evidence_cpu"
NEAR = 3  # of a model within this factor of the parameters, what others publish counts
BENCHMARK = "docs/benchmarks.md"
SDP4BIT, DELAYED_MUON = "arXiv 2410.15526, table 1", "arXiv 2606.30634"
MULOCO, STREAMING = "arXiv 2505.23725, 416M", "arXiv 2501.18512"


@dataclass(frozen=True)
class Measured:
    """In one training."""

    points: tuple[tuple[float, float], ...]  # (delay, or 1 for a wire; nats), the delays rising
    by: str
    source: str
    parameters: float
    optimizer: str
    predicted_weights: bool = False  # of a delay


@dataclass(frozen=True)
class Loss:
    """What is expected, and by what evidence."""

    nats: float
    evidence: str


_CPU = (OURS_CPU, BENCHMARK, 134_912)
WIRES = {
    "int8": (Measured(((1, 0.001),), *_CPU, "muon"), Measured(((1, -0.003),), *_CPU, "adamw")),
    "int4": (
        # GPT-350M, 80,000 iterations, Adam: 2.08964 with both legs in 4 bits, 2.08719 without.
        Measured(((1, 0.0025),), PUBLISHED, SDP4BIT, 350e6, "adamw"),
        # It does not get less with the size of the model: see BENCHMARK.
        Measured(((1, 0.0199),), OURS_GPU, BENCHMARK, 8_149_824, "muon"),
        Measured(((1, 0.0116),), OURS_GPU, BENCHMARK, 1_943_040, "muon"),
        Measured(((1, 0.0127),), OURS_GPU, BENCHMARK, 499_776, "muon"),
        Measured(((1, 0.012),), *_CPU, "muon"),
        Measured(((1, -0.014),), *_CPU, "adamw"),
    ),
}
DELAYS = (
    # SmolLM-360M, a whole step late: 2.590 where the synchronous run has 2.578.
    Measured(((1, 0.012),), PUBLISHED, DELAYED_MUON, 360e6, "muon"),
    Measured(((0.5, 0.073), (1, 0.174)), *_CPU, "muon", predicted_weights=True),
    Measured(((0.25, 0.040), (0.5, 0.113), (1, 0.402)), *_CPU, "muon"),
    Measured(((0.5, 0.742), (1, 0.929)), *_CPU, "adamw", predicted_weights=True),
    Measured(((0.25, 0.218), (0.5, 0.781), (1, 1.321)), *_CPU, "adamw"),
)
# A whole step late on predicted weights, with Muon, costs about the less the more steps have waited before: the product
# of both [nats x steps], the largest of each size. With 90 to 675 steps that waited, of 900 and 2,700; with 0.13M
# parameters, on a CPU, with 75.
WAITED = {499_776: 2.6, 1_943_040: 1.8, 8_149_824: 1.3}
FEWEST_WAITED = 75

# Rounds of 30 local steps: with 16 ranks above the synchronous run of the same optimizer (2.713 and 2.641; 2.808 and
# 2.682), each tuned by itself. With one rank it is no more than that run.
LOCAL_STEPS, ROUND_RANKS = 30, 16
ROUNDS = {"muon": 0.072, "adamw": 0.126}
# Of 2.8 nats 0.2 % at the most, where the exchange takes up to ten steps of the next round (in fragments).
LATE_STEPS, LATE_ROUNDS = 10, 0.006


# Loss = E + A / parameters^alpha + B / tokens^beta: the fit of Hoffmann et al. 2022 as Besiroglu et al. corrected it in
# 2024 (arXiv 2404.10102).
B, BETA = 2085.43, 0.3658


def tokens_factor(nats: float, tokens: float) -> float:
    """How many times as many tokens make up for `nats` at the end of a training with `tokens`; inf where none do.

    An estimate: the fit is of larger models on English text, in nats per token of their tokenizer.
    """
    left = B / tokens**BETA  # what more text could still take away
    return (1 - nats / left) ** (-1 / BETA) if 0 <= nats < left else 1.0 if nats < 0 else float("inf")


def expected_loss(config: TrainConfig) -> Loss:
    """Of the wire and the delay of this configuration: what they cost is added up, as nobody has measured
    all pairs."""
    found = []
    if config.wire in WIRES:
        found.append(_of_wire(config, config.wire))
    elif config.wire != "fp32":
        # Not measured by itself. It keeps more digits than int8.
        of_int8 = _of_wire(config, "int8")
        found.append(Loss(max(0.0, of_int8.nats), text("evidence_of_int8", evidence=of_int8.evidence)))
    if config.delay:
        found.append(_of_delay(config))
    return Loss(sum(one.nats for one in found), "; ".join(dict.fromkeys(one.evidence for one in found)))


def loss_of_rounds(config: TrainConfig, ranks: int) -> Loss:
    """What strategy=rounds costs with LOCAL_STEPS, and a delay of LATE_STEPS at most: for fewer ranks than were
    measured, on a straight line over their logarithm. The wire's own cost is added."""
    of_wire = expected_loss(replace(config, strategy="sharded", delay=0.0))
    nats = of_wire.nats + ROUNDS[config.optimizer] * math.log(ranks, ROUND_RANKS)
    words = [text("evidence_in_part", evidence=MULOCO)]
    if config.delay:
        nats, words = nats + LATE_ROUNDS, [*words, STREAMING]
    return Loss(nats, "; ".join([*words, of_wire.evidence]))


def _of_wire(config: TrainConfig, wire: str) -> Loss:
    best = _best(config, WIRES[wire])
    return Loss(best.points[0][1], _words(config, best))


def _of_delay(config: TrainConfig) -> Loss:
    """What steps without a delay at the beginning save, or what it costs from the first step on."""
    early = _of_early_delay(config)
    if config.optimizer != "muon" or not config.predicted_weights or config.delay_after < FEWEST_WAITED:
        return early
    parameters = min(WAITED, key=lambda one: abs(math.log(one / parameter_count(config))))
    nats = config.delay * WAITED[parameters] / config.delay_after
    words = text(OURS_GPU, source=BENCHMARK, size=_size(parameters))
    return Loss(nats, text("evidence_waited", evidence=words)) if nats < early.nats else early


def _of_early_delay(config: TrainConfig) -> Loss:
    """Between two measured delays on a straight line: with Muon, those that were measured lie below it."""
    # A delay costs AdamW far more than Muon: what another optimizer loses says nothing. Predicted weights lower the
    # cost, so where only others have measured, without them, theirs is an upper bound.
    usable = [
        one
        for one in DELAYS
        if one.optimizer == config.optimizer
        and (one.by != OURS_CPU or one.predicted_weights == config.predicted_weights)
    ]
    best = _best(config, usable)
    nats = next(
        low + (high - low) * (config.delay - before) / (after - before)
        for (before, low), (after, high) in pairwise(((0.0, 0.0), *best.points))
        if config.delay <= after
    )
    words = _words(config, best)
    if config.delay not in (delay for delay, _ in best.points):
        words = text("evidence_in_part", evidence=words)
    return Loss(nats, words)


def _best(config: TrainConfig, measured: Sequence[Measured]) -> Measured:
    """Of the same optimizer and about that size by whom we trust most, else ours of the nearest size. What another
    optimizer loses says something only where there is nothing else."""

    def distance(one: Measured) -> float:
        return abs(math.log(one.parameters / size))

    def is_far(one: Measured) -> bool:
        return distance(one) > math.log(NEAR)

    def rank(one: Measured) -> tuple[bool, bool, int, float]:
        trust = 0 if is_far(one) else TRUST.index(one.by)
        return one.optimizer != config.optimizer, is_far(one), trust, distance(one)

    size = parameter_count(config)
    return min((one for one in measured if one.by != PUBLISHED or not is_far(one)), key=rank)


def _words(config: TrainConfig, measured: Measured) -> str:
    words = text(measured.by, source=measured.source, size=_size(measured.parameters))
    if measured.optimizer != config.optimizer:
        words = text("evidence_other_optimizer", evidence=words)
    return words


def _size(parameters: float) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e6 else f"{parameters / 1e6:.2g}M"
