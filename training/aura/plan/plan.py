"""What a training will need, before any training: memory, time, traffic, disk (docs/plan.md). Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aura.config import TrainConfig
from aura.errors import ConfigError
from aura.plan.flops import flops_per_token
from aura.plan.gpus import Gpu
from aura.plan.memory import (
    Memory,
    checkpoint_bytes,
    has_rounds,
    host_bytes,
    is_delayed,
    link_bytes,
    local_bytes,
    save_bytes,
    state_bytes,
)
from aura.plan.notes import assumptions, notes
from aura.plan.rank import RankPlan, bytes_per_second, ranks_of
from aura.plan.shapes import parameter_count
from aura.plan.step_time import step_seconds
from aura.plan.units import duration, in_bytes, in_gib, in_seconds
from aura.texts.console import text

SCHEMA = "aura-plan-1"
# Copies of a run in memory (run/memory_copy.py): seconds from one to the next at least, and the part of the time in
# which one is being collected and written at most.
COPY_EVERY, COPY_BUSY = 60.0, 0.25


@dataclass(frozen=True)
class Plan:
    """The prediction. Times are seconds, sizes bytes; what depends on the speed of an unknown GPU is None."""

    preset: str
    device: str
    device_memory: float  # for the rank whose memory is fullest; `memory` is its too
    fullest_rank: int | None  # None: all are alike
    peak_flops: float | None  # per second, of the slowest rank
    peak_flops_of_all: float | None
    utilisation: float  # MFU that is assumed for the slowest rank
    nodes: int
    ranks: int
    link_mbit: float
    parameters: int
    memory: Memory
    sequences_per_step: int
    tokens_per_step: int
    flops_per_token: int
    compute_seconds: float | None
    communication_bytes: int  # that the link of each node sends, and receives, in one step
    communication_seconds: float
    exposed_seconds: float  # of it, what a delay does not hide behind computing; all of it without one
    host_bytes: int  # of main memory that a node needs
    save_bytes: int  # and that copies for a checkpoint take there, where it has them
    checkpoint_bytes: int
    checkpoints_on_disk: int
    save_every: int
    copies_apart: int  # steps between two places where a copy in memory can be made
    collecting_seconds: float  # of a checkpoint's parts from other nodes, where nothing else uses the link
    steps: int
    passes: float | None  # over the corpus, where that is known
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def seconds_per_step(self) -> float | None:
        return None if self.compute_seconds is None else self.compute_seconds + self.exposed_seconds

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def seconds(self) -> float | None:
        """Of the whole run, without validation, checkpoints and interruptions."""
        return None if self.seconds_per_step is None else self.steps * self.seconds_per_step

    @property
    def lost_seconds(self) -> tuple[float, float] | None:
        """Of work, by a death halfway between two checkpoints, and between two copies in memory."""
        if self.seconds_per_step is None:
            return None
        disk = self.save_every * self.seconds_per_step
        apart = self.copies_apart * self.seconds_per_step
        memory = max(COPY_EVERY, self.collecting_seconds / COPY_BUSY, apart)
        return disk / 2, min(disk, memory) / 2

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **asdict(self),
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "seconds_per_step": self.seconds_per_step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_parameter": self.tokens / self.parameters,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """What a person reads: (name, value)."""
        yield text("plan_preset"), text("plan_model", preset=self.preset, parameters=self.parameters)
        devices = text("plan_devices", nodes=self.nodes, ranks=self.ranks, device=self.device)
        yield text("plan_on"), devices
        rank = self.fullest_rank
        whose = text("plan_memory_of_a_rank") if rank is None else text("plan_memory_of_rank", rank=rank)
        needs, room = in_gib(self.memory.total), in_gib(self.device_memory)
        yield whose, text("plan_room", needs=needs, room=room, moment=self.memory.moment)
        for name, value in asdict(self.memory).items():
            if name != "moment" and value:
                size = in_gib(value)
                shown = text("plan_assumed_part", size=size) if name == "context" else size
                yield f"  {text(f'memory_{name}')}", shown
        sequences, tokens = self.sequences_per_step, self.tokens_per_step
        yield text("plan_batch"), text("plan_tokens_of_a_step", sequences=sequences, tokens=tokens)
        yield text("plan_work"), text("plan_flops", flops=self.flops_per_token / 1e9)
        yield text("plan_step"), self._time_of_a_step()
        if self.communication_bytes:
            sent = in_bytes(self.communication_bytes)
            yield text("plan_communication"), text("plan_traffic", sent=sent, link=self.link_mbit)
        needs, more = in_gib(self.host_bytes), in_gib(self.save_bytes)
        yield text("plan_main_memory"), text("plan_host", needs=needs, more=more)
        one, count = self.checkpoint_bytes, self.checkpoints_on_disk
        disk = text("plan_disk", one=in_bytes(one), count=count, all=in_bytes(one * count))
        yield text("plan_checkpoints"), disk
        if lost := self.lost_seconds:
            before, after = map(duration, lost)
            said = text("plan_lost_seconds", copies=after, disks=before, every=self.save_every)
            yield text("plan_lost"), said
        length = {"steps": self.steps, "tokens": self.tokens, "duration": duration(self.seconds)}
        yield text("plan_run"), text("plan_length", **length)
        if self.passes is not None:
            yield text("plan_passes"), f"{self.passes:.3g}"
        yield text("plan_tokens_per_parameter"), f"{self.tokens / self.parameters:.2g}"

    def lines(self) -> list[str]:
        """The whole plan as plain text."""
        said = [f"{name}: {value}" for name, value in self.rows()]
        said += [text("plan_assumed", sentence=sentence) for sentence in self.assumptions]
        return said + [text("plan_note", sentence=sentence) for sentence in self.notes]

    def _time_of_a_step(self) -> str:
        step = in_seconds(self.seconds_per_step)
        if self.compute_seconds is None or not self.communication_bytes:
            return step
        parts = {
            "compute": in_seconds(self.compute_seconds),
            "communication": in_seconds(self.communication_seconds),
            "exposed": in_seconds(self.exposed_seconds),
        }
        hidden = self.exposed_seconds < self.communication_seconds
        return text("plan_parts_with_a_delay" if hidden else "plan_parts_of_a_step", step=step, **parts)


def plan_for(
    config: TrainConfig,
    ranks: int,
    gpu: Gpu | Sequence[Gpu],
    *,
    nodes: int | None = None,
    link_mbit: float = 1000,
    hours: float | None = None,
    mfu: float | None = None,
    corpus_tokens: int | None = None,
) -> Plan:
    """The plan of a run with `ranks` ranks on `nodes` nodes (one each, unless said).

    `gpu`: of every rank, from gpus.py, or one for each rank. `hours`: in place of config.steps as many as fit. `mfu`:
    in place of what is assumed. `corpus_tokens`: of one pass. Raises ConfigError.
    """
    nodes = nodes or ranks
    devices = [gpu] * ranks if isinstance(gpu, Gpu) else list(gpu)
    of_ranks = ranks_of(config, devices, nodes, mfu)
    fullest = max(of_ranks, key=lambda rank: rank.memory.total / rank.room)
    # The others wait for the slowest; one whose speed is not known may be it.
    slowest = max(of_ranks, key=lambda rank: math.inf if rank.seconds is None else rank.seconds)
    compute = slowest.seconds
    sent = link_bytes(config, ranks, nodes)
    communication = sent / bytes_per_second(link_mbit)
    exposed = _exposed_seconds(config, of_ranks, nodes, link_mbit, communication, compute)
    sequences = sum(config.shares(ranks))
    tokens_per_step = sequences * config.seq_len
    steps = _steps(config, tokens_per_step, corpus_tokens)
    if hours is not None:
        if compute is None:
            raise ConfigError("hours_need_speed", device=slowest.device.name)
        steps = max(1, int(hours * 3600 / (compute + exposed)))
    alike = len({(rank.memory.total, rank.room) for rank in of_ranks}) == 1
    fullest_rank = None if alike else of_ranks.index(fullest)
    peaks = [rank.peak for rank in of_ranks]
    collected = state_bytes(config, ranks) - local_bytes(config, ranks)
    return Plan(
        preset=config.preset,
        device=_names(devices),
        device_memory=fullest.room,
        fullest_rank=fullest_rank,
        peak_flops=slowest.peak,
        peak_flops_of_all=None if None in peaks else sum(peak for peak in peaks if peak),
        utilisation=slowest.utilisation,
        nodes=nodes,
        ranks=ranks,
        link_mbit=link_mbit,
        parameters=parameter_count(config),
        memory=fullest.memory,
        sequences_per_step=sequences,
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(config),
        compute_seconds=compute,
        communication_bytes=sent,
        communication_seconds=communication,
        exposed_seconds=exposed,
        host_bytes=host_bytes(config, ranks, nodes, fullest.device.is_gpu, fullest.memory.total),
        save_bytes=save_bytes(config, ranks),
        checkpoint_bytes=checkpoint_bytes(config, ranks),
        checkpoints_on_disk=config.keep_checkpoints + 2,  # the best one, and one that is being written
        save_every=config.save_every,
        copies_apart=_copies_apart(config, ranks),
        collecting_seconds=collected * (1 - 1 / nodes) / bytes_per_second(link_mbit),
        steps=steps,
        passes=steps * tokens_per_step / corpus_tokens if corpus_tokens else None,
        assumptions=tuple(assumptions(config, of_ranks, fullest, is_sent=bool(sent))),
        notes=tuple(notes(config, of_ranks, fullest_rank, compute, exposed, steps * tokens_per_step)),
    )


def _exposed_seconds(
    config: TrainConfig,
    of_ranks: Sequence[RankPlan],
    nodes: int,
    link_mbit: float,
    communication: float,
    compute: float | None,
) -> float:
    """What of the exchange's `communication` a step waits for."""
    if not (is_delayed(config, len(of_ranks)) and communication and compute is not None):
        return communication
    works = [rank.work for rank in of_ranks if rank.work]
    return max(0.0, step_seconds(config, works, nodes, bytes_per_second(link_mbit)) - compute)


def _steps(config: TrainConfig, tokens_per_step: int, corpus_tokens: int | None) -> int:
    if config.tokens:
        return math.ceil(config.tokens / tokens_per_step)
    if config.epochs and corpus_tokens:
        return math.ceil(config.epochs * corpus_tokens / tokens_per_step)
    return config.steps


def _copies_apart(config: TrainConfig, ranks: int) -> int:
    if not has_rounds(config, ranks):
        return 1
    return min(config.save_every, config.validate_every) if config.delay else config.local_steps


def _names(devices: list[Gpu]) -> str:
    """'RTX 3060', or '1 x RTX 3090, 4 x RTX 3060'."""
    counts = Counter(device.name for device in devices)
    if len(counts) == 1:
        return devices[0].name
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def compare(
    plan: Plan,
    measured_seconds_per_step: float,
    measured_peak_bytes: int | None,
    steps: int,
    warmed_up: bool = True,
    predicted: float | None = None,
    one_pc: float | None = None,
) -> str:
    """One line after the run. `measured_peak_bytes`: torch.cuda.max_memory_allocated(); None on a CPU. `steps`: that
    the time is the mean of; `warmed_up`: without the slow first ones, which the plan does not know. `predicted`:
    seconds per step by what was measured at the start, in place of the plan's; `one_pc`: what one PC would take."""
    measured = in_seconds(measured_seconds_per_step)
    if (predicted := predicted or plan.seconds_per_step) is not None:
        difference = measured_seconds_per_step / predicted - 1
        time = {"predicted": in_seconds(predicted), "measured": measured, "difference": difference}
        said = [text("predicted_time", **time)]
    else:
        said = [text("predicted_no_time", measured=measured)]
    said[0] += " " + text("measured_over" if warmed_up else "measured_with_warm_up", steps=steps)
    if one_pc:
        said.append(text("measured_times", times=one_pc / measured_seconds_per_step))
    if measured_peak_bytes is not None:
        tensors = plan.memory.tensors
        memory = {"predicted": in_gib(tensors), "measured": in_gib(measured_peak_bytes)}
        said.append(text("predicted_memory", **memory, difference=measured_peak_bytes / tensors - 1))
    return text("predicted", what="; ".join(said))
