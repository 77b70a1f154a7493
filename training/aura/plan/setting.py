"""`strategy=auto`: of the wires and delays whose exchange hides behind the computing of a step, the most exact one.

Where none hides, the one with the shortest step. What each costs in loss, and who has measured it: docs/plan.md. The
same rule decides for `aura plan`, by the table of GPUs, and at the start of a run, by what has been measured there.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from aura.config import TrainConfig
from aura.plan.gpus import Gpu
from aura.plan.memory import CODE_BITS, fits, wire_bytes
from aura.plan.rank import bytes_per_second, ranks_of
from aura.plan.step_time import (
    Coding,
    Work,
    compute_seconds,
    fraction,
    one_pc_seconds,
    smallest_delay,
    step_seconds,
)
from aura.texts.console import text

CHOSEN = ("strategy", "wire", "delay", "delay_after")  # what `auto` decides of a configuration
# On one core, of an int4 element; a run measures it. On a GPU it is not known, and not counted.
CODING_ON_CPU = Coding(encode=4.6e-9, decode=4.0e-9)
HIDES = 1.05  # times its computing a step takes at the most whose exchange hides
ROOM = 0.9  # of a card's memory: the driver takes some of it, and a desktop
# A delay costs most in the first steps: it begins after a part of the run, and after as many as were measured.
STRICT_PART, STRICT_STEPS = 20, 75
DOMINATES = 1.25  # a step that takes so many times its computing: what else would help is said
LOCAL_STEPS, LATE_STEPS = 30, 10  # of strategy=rounds, as others have published it


@dataclass(frozen=True)
class Cluster:
    """What a step is computed and sent with."""

    nodes: int
    works: tuple[Work, ...]  # of every rank
    speed: float  # bytes per second that every node's link sends, while it receives as many
    codings: Mapping[str, Coding] = field(default_factory=dict)  # by wire
    rooms: tuple[float, ...] = ()  # bytes of memory of every rank; (): enough
    on_gpu: bool = True


def cluster_of(
    config: TrainConfig, devices: Sequence[Gpu], nodes: int, link_mbit: float, mfu: float | None = None
) -> Cluster | None:
    """As the plan knows it; None where the speed of a device is not known. devices: of every rank. Raises
    ConfigError."""
    ranks = ranks_of(config, devices, nodes, mfu)
    works = tuple(rank.work for rank in ranks if rank.work)
    if len(works) < len(ranks):
        return None
    on_cpu = not all(device.is_gpu for device in devices)
    return Cluster(
        nodes=nodes,
        works=works,
        speed=bytes_per_second(link_mbit),
        codings=dict.fromkeys(CODE_BITS, CODING_ON_CPU) if on_cpu else {},
        rooms=tuple(rank.room for rank in ranks),
        on_gpu=any(device.is_gpu for device in devices),
    )


@dataclass(frozen=True)
class Candidate:
    wire: str
    delay: float
    delay_after: int
    step_seconds: float  # the mean of the run's
    times_one_pc: float
    hides: bool  # its exchange, once the delay has begun
    fits: bool  # the memory

    @property
    def name(self) -> str:
        return setting_name(self.wire, self.delay, self.delay_after)

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        return exchanging(config, self.wire, self.delay, self.delay_after)

    def line(self) -> str:
        said = text("candidate", name=self.name, step=self.step_seconds, times=self.times_one_pc)
        said += text("candidate_hides") if self.hides else ""
        return said + ("" if self.fits else text("candidate_has_no_room"))


@dataclass(frozen=True)
class Decision:
    candidates: tuple[Candidate, ...]  # the exact one first
    chosen: Candidate
    one_pc_seconds: float  # for the same tokens
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> list[str]:
        return [*(one.line() for one in self.candidates), *self.notes]

    def as_json(self) -> dict[str, Any]:
        return {"candidates": [asdict(one) for one in self.candidates], "chosen": asdict(self.chosen)}

    @property
    def reason(self) -> str:
        why = text("setting_hides" if self.chosen.hides else "setting_fastest")
        return text("setting", name=self.chosen.name, why=why)


def setting_name(wire: str, delay: float, delay_after: int) -> str:
    if not delay:
        return text("candidate_exact") if wire == "fp32" else text("candidate_strict", wire=wire)
    said = text("candidate_delayed", wire=wire, delay=delay)
    return said + (text("candidate_waits", delay_after=delay_after) if delay_after else "")


def exchanging(config: TrainConfig, wire: str, delay: float, delay_after: int = 0) -> TrainConfig:
    return replace(config, strategy="sharded", wire=wire, delay=delay, delay_after=delay_after)


def decide(config: TrainConfig, cluster: Cluster) -> Decision:
    """It changes neither batch nor optimizer."""
    decision = _decided(exchanging(config, "fp32", 0.0, config.delay_after), cluster)
    return replace(decision, notes=tuple(_notes(config, cluster, decision)))


def _decided(config: TrainConfig, cluster: Cluster) -> Decision:
    one_pc = one_pc_seconds(config, cluster.works, cluster.nodes)
    candidates = tuple(_candidate(one, cluster, one_pc) for one in _by_exactness(config, cluster))
    possible = [one for one in candidates if one.fits] or candidates[:1]
    hidden = (one for one in possible if one.hides)
    chosen = next(hidden, None) or min(possible, key=lambda one: one.step_seconds)
    return Decision(candidates, chosen, one_pc)


def _by_exactness(config: TrainConfig, cluster: Cluster) -> Iterator[TrainConfig]:
    """The exact one first. A delay is the smallest that hides the exchange, and only with Muon: it ruins what AdamW
    learns."""
    waits = config.delay_after or max(STRICT_STEPS, config.steps // STRICT_PART)
    for wire in ("fp32", "bf16", *CODE_BITS):
        strict = exchanging(config, wire, 0.0)
        if wire == "fp32" or wire_bytes(strict) != wire_bytes(config):  # where parameters are in bf16
            yield strict
        if wire in CODE_BITS and config.optimizer == "muon" and waits < config.steps:
            delay = smallest_delay(strict, cluster.works, cluster.nodes, cluster.speed)
            yield exchanging(config, wire, delay, waits)


def _candidate(config: TrainConfig, cluster: Cluster, one_pc: float) -> Candidate:
    def seconds(one: TrainConfig, speed: float) -> float:
        return step_seconds(one, cluster.works, cluster.nodes, speed, cluster.codings)

    mean, late = seconds(config, cluster.speed), replace(config, delay_after=0)
    computing = step_seconds(config, cluster.works, cluster.nodes, math.inf)
    return Candidate(
        wire=config.wire,
        delay=config.delay,
        delay_after=config.delay_after,
        step_seconds=mean,
        times_one_pc=one_pc / mean,
        hides=seconds(late, cluster.speed) <= HIDES * computing,
        fits=_has_room(config, cluster),
    )


def _has_room(config: TrainConfig, cluster: Cluster) -> bool:
    """Also hours later, when the delay begins: what was not there when the run was tried."""
    return not cluster.rooms or fits(
        config, [ROOM * room for room in cluster.rooms], cluster.on_gpu, len(cluster.works)
    )


def _notes(config: TrainConfig, cluster: Cluster, decision: Decision) -> Iterator[str]:
    """Where even the best setting leaves the link most of a step: what another training would give."""
    ranks, step = len(cluster.works), decision.chosen.step_seconds
    computing = max(compute_seconds(config, work, ranks) for work in cluster.works)
    if step <= DOMINATES * computing:
        return
    yield text(
        "note_link", part=1 - computing / step, nodes=cluster.nodes, times=decision.chosen.times_one_pc
    )
    tokens = sum(config.shares(ranks)) * config.seq_len
    for factor in (2, 4):
        works = tuple(replace(work, micro_batches=factor * work.micro_batches) for work in cluster.works)
        other = _decided(config, replace(cluster, works=works)).chosen
        yield text(
            "note_other", what=f"global_batch_tokens={factor * tokens} {other.name}", times=other.times_one_pc
        )
    formats = (config.parameter_format, config.moment_format)
    if config.optimizer != "muon" and formats == ("fp32", "fp32"):
        other = _decided(replace(config, optimizer="muon"), cluster).chosen
        yield text("note_other", what=f"optimizer=muon {other.name}", times=other.times_one_pc)
    yield _note_on_rounds(config, cluster, decision.one_pc_seconds)


def _note_on_rounds(config: TrainConfig, cluster: Cluster, one_pc: float) -> str:
    """Another algorithm, which asks less of the link; with a delay whose cost somebody has measured."""
    rounds = replace(config, strategy="rounds", wire="int4", local_steps=LOCAL_STEPS)

    def seconds(one: TrainConfig) -> float:
        return step_seconds(one, cluster.works, cluster.nodes, cluster.speed, cluster.codings)

    delays = (replace(rounds, delay=fraction(late, LOCAL_STEPS)) for late in range(LATE_STEPS + 1))
    rounds = min(delays, key=lambda one: (round(seconds(one), 3), one.delay))
    what = f"strategy=rounds wire=int4 local_steps={LOCAL_STEPS} delay={rounds.delay:g}"
    said = text("note_other", what=what, times=one_pc / seconds(rounds))
    return said + ("" if _has_room(rounds, cluster) else text("candidate_has_no_room"))
