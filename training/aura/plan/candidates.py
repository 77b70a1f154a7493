"""`strategy=auto`: which wires and delays there are to choose from, what each of them would give, and which is taken.

Standard library only. The same function decides for `aura plan`, by the table of GPUs, and at the start of a run, by
what has been measured there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from aura.config import TrainConfig
from aura.plan.evidence import LATE_STEPS, LOCAL_STEPS, Loss, expected_loss, loss_of_rounds, tokens_factor
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
EQUAL = 1.02  # times as long is as fast; the more exact one is taken then
ROOM = 0.9  # of a card's memory: the driver takes some of it, and a desktop
# Parts of a run, at its beginning, that may go without the delay: what a delay costs is mostly lost there.
WAITING = (0, 1 / 40, 1 / 20, 1 / 10, 1 / 4)
DOMINATES = 1.25  # a step that takes so many times its computing: what else would help is said


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
    loss: Loss
    times_to_loss: float  # how many times as fast as one PC it is at the loss that one PC ends with
    fits: bool = True

    @property
    def name(self) -> str:
        if self.delay:
            return setting_name(self.wire, self.delay, self.delay_after)
        return text("candidate_exact") if self.wire == "fp32" else text("candidate_strict", wire=self.wire)

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        return exchanging(config, self.wire, self.delay, self.delay_after)

    def line(self, tolerance: float) -> str:
        said = text("candidate", name=self.name, step=self.step_seconds, times=self.times_one_pc)
        if self.wire != "fp32":
            said += text(
                "candidate_loss", nats=self.loss.nats, to_loss=self.times_to_loss, evidence=self.loss.evidence
            )
        if self.loss.nats > tolerance:
            said += text("candidate_costs_too_much", tolerance=tolerance)
        return said + (text("candidate_has_no_room") if not self.fits else "")


@dataclass(frozen=True)
class Decision:
    candidates: tuple[Candidate, ...]  # the exact one first
    chosen: Candidate
    why: str
    one_pc_seconds: float  # for the same tokens
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> list[str]:
        return [*(one.line(self.tolerance) for one in self.candidates), *self.notes]

    def as_json(self) -> dict[str, Any]:
        return {"candidates": [asdict(one) for one in self.candidates], "chosen": asdict(self.chosen)}

    @property
    def reason(self) -> str:
        return text("setting", name=self.chosen.name, why=self.why)


def setting_name(wire: str, delay: float, delay_after: int) -> str:
    said = text("candidate_delayed", wire=wire, delay=delay)
    return said + (text("candidate_waits", delay_after=delay_after) if delay_after else "")


def exchanging(config: TrainConfig, wire: str, delay: float, delay_after: int = 0) -> TrainConfig:
    return replace(config, strategy="sharded", wire=wire, delay=delay, delay_after=delay_after)


def decide(config: TrainConfig, cluster: Cluster) -> Decision:
    """What is the first at the loss that one PC ends with, of the settings whose expected loss is within
    `loss_tolerance`. It changes neither batch nor optimizer."""
    config = exchanging(config, "fp32", 0.0, config.delay_after)
    decision = _decided(config, cluster)
    return replace(decision, notes=tuple(_notes(config, cluster, decision)))


def _decided(config: TrainConfig, cluster: Cluster) -> Decision:
    one_pc = one_pc_seconds(config, cluster.works, cluster.nodes)
    candidates = tuple(_candidates(config, cluster, one_pc))
    chosen, why = _best(config, cluster, candidates)
    return Decision(candidates, chosen, why, one_pc, config.loss_tolerance)


def _candidates(config: TrainConfig, cluster: Cluster, one_pc: float) -> Iterator[Candidate]:
    """The exact one first; with a delay the smallest that hides the exchange, where the optimizer bears one. It begins
    as late as makes no more difference to the time until the loss than EQUAL."""
    settings = [(wire, 0.0) for wire in ("fp32", "bf16", *CODE_BITS)]
    if config.optimizer == "muon":
        for wire in CODE_BITS:
            of_wire = replace(config, wire=wire)
            settings.append((wire, smallest_delay(of_wire, cluster.works, cluster.nodes, cluster.speed)))
    for wire, delay in settings:
        other = exchanging(config, wire, delay)
        if wire != "fp32" and wire_bytes(other) == wire_bytes(config):
            continue  # parameters in bf16
        waits = [0]
        if delay:
            waits = (
                [config.delay_after] if config.delay_after else [int(config.steps * part) for part in WAITING]
            )
        found = [_candidate(replace(other, delay_after=steps), cluster, one_pc) for steps in waits]
        soonest = max(one.times_to_loss for one in found)
        yield max(
            (one for one in found if EQUAL * one.times_to_loss >= soonest), key=lambda one: one.delay_after
        )


def _candidate(config: TrainConfig, cluster: Cluster, one_pc: float) -> Candidate:
    seconds = step_seconds(config, cluster.works, cluster.nodes, cluster.speed, cluster.codings)
    has_room = _has_room(config, cluster)
    loss, times = expected_loss(config), one_pc / seconds
    to_loss = times / tokens_factor(loss.nats, _tokens(config, cluster))
    return Candidate(
        config.wire, config.delay, config.delay_after, seconds, times, loss, to_loss, fits=has_room
    )


def _has_room(config: TrainConfig, cluster: Cluster) -> bool:
    """Also hours later, when the delay begins: what was not there when the run was tried."""
    return not cluster.rooms or fits(
        config, [ROOM * room for room in cluster.rooms], cluster.on_gpu, len(cluster.works)
    )


def _best(config: TrainConfig, cluster: Cluster, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    exact = candidates[0]
    computing = step_seconds(config, cluster.works, cluster.nodes, math.inf)
    if exact.step_seconds <= EQUAL * computing:
        return exact, text("setting_fast_link", part=1 - computing / exact.step_seconds)
    tolerance = config.loss_tolerance
    if not tolerance:  # what was measured below zero is chance
        return exact, text("setting_asked_exact")
    allowed = [exact, *(one for one in candidates[1:] if one.fits and one.loss.nats <= tolerance)]
    fastest = max(one.times_to_loss for one in allowed)
    equal = [one for one in allowed if EQUAL * one.times_to_loss >= fastest]
    # Without a delay the wire with more bits; with one, where both hide the exchange, what is expected to lose less.
    chosen = min(
        equal, key=lambda one: (one.delay > 0, one.loss.nats if one.delay else 0, candidates.index(one))
    )
    return chosen, text("setting_fastest", tolerance=tolerance)


def _notes(config: TrainConfig, cluster: Cluster, decision: Decision) -> Iterator[str]:
    """Where even the best setting leaves the link most of a step: what another batch, or Muon, would give."""
    ranks, step = len(cluster.works), decision.chosen.step_seconds
    computing = max(compute_seconds(config, work, ranks) for work in cluster.works)
    if step <= DOMINATES * computing:
        return
    tokens = sum(config.shares(ranks)) * config.seq_len
    yield text(
        "note_link", part=1 - computing / step, nodes=cluster.nodes, times=decision.chosen.times_to_loss
    )
    for factor in (2, 4):
        works = tuple(replace(work, micro_batches=factor * work.micro_batches) for work in cluster.works)
        other = _decided(config, replace(cluster, works=works)).chosen
        yield text("note_larger_batch", tokens=factor * tokens, name=other.name, times=other.times_to_loss)
    yield _note_on_rounds(config, cluster, decision.one_pc_seconds)
    formats = (config.parameter_format, config.moment_format)
    if config.optimizer != "muon" and formats == ("fp32", "fp32"):
        other = _decided(replace(config, optimizer="muon"), cluster).chosen
        loss = {"nats": other.loss.nats, "evidence": other.loss.evidence}
        yield text("note_muon", name=other.name, times=other.times_to_loss, **loss)


def _note_on_rounds(config: TrainConfig, cluster: Cluster, one_pc: float) -> str:
    """What another algorithm would give, which asks less of the link; with a delay whose cost somebody has measured."""
    ranks = len(cluster.works)
    rounds = replace(config, strategy="rounds", wire="int4", local_steps=LOCAL_STEPS)

    def seconds(one: TrainConfig) -> float:
        return step_seconds(one, cluster.works, cluster.nodes, cluster.speed, cluster.codings)

    delays = (replace(rounds, delay=fraction(late, LOCAL_STEPS)) for late in range(LATE_STEPS + 1))
    rounds = min(delays, key=lambda one: (round(seconds(one), 3), one.delay))
    times, loss = one_pc / seconds(rounds), loss_of_rounds(rounds, ranks)
    said = text(
        "note_rounds",
        local_steps=LOCAL_STEPS,
        delay=rounds.delay,
        times=times,
        to_loss=times / tokens_factor(loss.nats, _tokens(config, cluster)),
        nats=loss.nats,
        evidence=loss.evidence,
    )
    return said + ("" if _has_room(rounds, cluster) else text("candidate_has_no_room"))


def _tokens(config: TrainConfig, cluster: Cluster) -> float:
    """Of the whole run."""
    return sum(config.shares(len(cluster.works))) * config.seq_len * config.steps
