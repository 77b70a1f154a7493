"""How long a step takes with `strategy=sharded` (docs/engine.md has a picture). Standard library only.

A rank computes k micro-batches of c seconds each; the first j = ceil(f k) of them, with f = `delay`, while the exchange
of the step before is under way (strategy/delayed.py). Gradients leave behind the last micro-batch, k - j of them after
the weights of the step before were put in, and j micro-batches later the new weights have to be there, or are waited
for. So from one `apply_update` to the next

    step = (k - j) c + max(j c, exchange)

With all of them late (j = k) the gradients wait for `apply_update`, and the same holds. Between its two halves the
exchange holds the owner's update, of u seconds. It takes its time on the device from the late micro-batches: both are
as much longer, so that

    step = k c + u + max(0, exchange - j c)

Without a delay j = 0, and nothing is hidden. Of unlike ranks the slowest decides, rank by rank with the same formula:
an exchange begins when the last gradients are there. What wire=int8 and int4 send has to be encoded and decoded,
which is counted as computing.

The first `delay_after` steps have no delay, and a step is the mean over the run.

With strategy=rounds each rank updates everything itself, and once in `local_steps` steps both directions are waited
for, less what a delay of whole steps hides: a step is longer by the part of that which falls to it.

Not counted, so that it is an upper bound there: what of the reduce-scatter happens during the last backward pass
(where j < k), and of the all-gather during the next forward pass (where j = 0). Not counted either: the numbers, some
hundred bytes of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aura.config import TrainConfig
from aura.plan.flops import flops_per_token, update_flops_of_a_rank
from aura.plan.memory import link_bytes, steps_apart
from aura.plan.shapes import shape_of


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step."""

    micro_batches: int
    seconds: float  # of each of them, forward and backward
    tokens: float  # of each of them


@dataclass(frozen=True)
class Coding:
    """Seconds for each element, on the slowest rank."""

    encode: float = 0.0
    decode: float = 0.0


def late_micro_batches(delay: float, micro_batches: int) -> int:
    """As run/batches.py counts them."""
    return math.ceil(delay * micro_batches)


def compute_seconds(config: TrainConfig, work: Work, ranks: int) -> float:
    """k c + u; u as a part of c by their floating-point operations."""
    of_tokens = work.tokens * flops_per_token(config)
    return work.seconds * (work.micro_batches + update_flops_of_a_rank(config, ranks) / of_tokens)


def coding_seconds(config: TrainConfig, ranks: int, codings: Mapping[str, Coding]) -> float:
    """Each rank encodes all gradients and what it owns, and decodes from all as many gradients as it owns, and all
    changes. `codings`: by wire; what is not in it takes no time."""
    coding = codings.get(config.wire, Coding())
    coded = (1 + 1 / ranks) * coding.encode + 2 * coding.decode
    return shape_of(config).stored * coded / steps_apart(config)


def step_seconds(
    config: TrainConfig,
    works: Sequence[Work],
    nodes: int,
    speed: float,
    codings: Mapping[str, Coding] | None = None,
) -> float:
    """Of all ranks together, the mean of the run's. speed: bytes per second that every node's link sends while it
    receives as many."""
    late = _step_seconds(config, works, nodes, speed, codings or {})
    if not config.delay or not config.delay_after or config.strategy == "rounds":
        return late
    strict = _step_seconds(replace(config, delay=0.0), works, nodes, speed, codings or {})
    return late + (strict - late) * min(1.0, config.delay_after / config.steps)


def _step_seconds(
    config: TrainConfig, works: Sequence[Work], nodes: int, speed: float, codings: Mapping[str, Coding]
) -> float:
    """With the delay of the configuration from its beginning on."""
    ranks = len(works)
    exchange = link_bytes(config, ranks, nodes) / speed
    coding = coding_seconds(config, ranks, codings)
    computing = [compute_seconds(config, work, ranks) for work in works]
    hidden = [
        late_micro_batches(config.delay, config.local_steps) / config.local_steps * seconds
        if config.strategy == "rounds"
        else late_micro_batches(config.delay, work.micro_batches) * work.seconds
        for work, seconds in zip(works, computing, strict=True)
    ]
    return max(
        seconds + coding + max(0.0, exchange - behind)
        for seconds, behind in zip(computing, hidden, strict=True)
    )


def one_pc_seconds(config: TrainConfig, works: Sequence[Work], pcs: int) -> float:
    """The same tokens on one of so many PCs; on the average one, where they are unlike."""
    return sum(compute_seconds(config, work, len(works)) for work in works) * pcs / len(works)


def smallest_delay(config: TrainConfig, works: Sequence[Work], nodes: int, speed: float) -> float:
    """The least part of a step, in whole micro-batches, that hides the exchange of `config.wire`; 1.0 where none does,
    which hides most."""
    config = replace(config, delay_after=0)
    hidden = step_seconds(config, works, nodes, math.inf)
    k = max(work.micro_batches for work in works)
    fractions = (fraction(j, k) for j in range(1, k))
    enough = (f for f in fractions if step_seconds(replace(config, delay=f), works, nodes, speed) <= hidden)
    return next(enough, 1.0)


def fraction(late: int, micro_batches: int) -> float:
    """late / micro_batches with four digits, rounded so that `late_micro_batches` gives `late`."""
    digits = math.floor(late / micro_batches * 10_000)
    while late_micro_batches(digits / 10_000, micro_batches) > late:  # 0.28 x 25 is a little more than 7
        digits -= 1
    return digits / 10_000
