"""What a training will need, before any training: memory, time, traffic, disk (docs/plan.md). Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aura.config import TrainConfig
from aura.errors import ConfigError
from aura.flops import flops_per_token, utilisation
from aura.gpus import Gpu
from aura.memory import (
    GIB,
    Memory,
    checkpoint_bytes,
    memory_of,
    parameter_bytes,
    parameter_count,
    settings_that_fit,
)

SCHEMA = "aura-plan-1"
GIGABIT = 117.5e6  # bytes per second of data: TCP over Ethernet with frames of 1,500 bytes
ENOUGH_TOKENS = 20  # per parameter, for the best model of a given cost: Hoffmann et al. 2022 (Chinchilla)


@dataclass(frozen=True)
class Plan:
    """The prediction. Times are seconds, sizes bytes; what depends on the speed of an unknown GPU is None."""

    preset: str
    device: str
    device_memory: float  # for the rank whose memory is fullest; `memory` is its too
    fullest_rank: int
    peak_flops: float | None  # per second, of the slowest rank
    peak_flops_of_all: float | None
    utilisation: (
        float  # of the slowest rank: the part of its peak that the model's work is assumed to be (MFU)
    )
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
    checkpoint_bytes: int
    checkpoints_on_disk: int
    steps: int
    passes: float | None  # over the corpus, where that is known
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def seconds_per_step(self) -> float | None:
        return None if self.compute_seconds is None else self.compute_seconds + self.communication_seconds

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def seconds(self) -> float | None:
        """Of the whole run, without validation, checkpoints and interruptions."""
        return None if self.seconds_per_step is None else self.steps * self.seconds_per_step

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
        yield "preset", f"{self.preset}, {self.parameters:,} parameters"
        yield "on", f"{self.nodes} node(s), {self.ranks} rank(s), {self.device}"
        room = f"{_gib(self.memory.total)} of {_gib(self.device_memory)}"
        whose = "a rank" if " x " not in self.device else f"rank {self.fullest_rank}"
        yield f"memory of {whose}", f"{room}, at its highest ({self.memory.moment})"
        for name, value in asdict(self.memory).items():
            if name != "moment" and value:
                yield f"  {name.replace('_', ' ')}", _gib(value) + (" (assumed)" if name == "context" else "")
        batch = f"{self.sequences_per_step:,} sequences = {self.tokens_per_step:,} tokens"
        yield "effective batch", f"{batch} per optimizer step"
        yield "work", f"{self.flops_per_token / 1e9:.3g} GFLOP per token (6 N + 12 layers d_model seq_len)"
        yield "time of a step", _seconds(self.seconds_per_step) + self._parts()
        if self.communication_bytes:
            sent = f"{_size(self.communication_bytes)} each way and node"
            yield "communication of a step", f"{sent} at {self.link_mbit:g} Mbit/s (ring all-reduce)"
        disk = f"{_size(self.checkpoint_bytes)} each, up to {self.checkpoints_on_disk} at a time"
        yield (
            "checkpoints",
            f"{disk}: {_size(self.checkpoint_bytes * self.checkpoints_on_disk)} on every node",
        )
        yield "run", f"{self.steps:,} steps, {self.tokens:,} tokens, {duration(self.seconds)}"
        if self.passes is not None:
            yield "passes over the corpus", f"{self.passes:.3g}"
        yield "tokens per parameter", f"{self.tokens / self.parameters:.2g}"

    def lines(self) -> list[str]:
        """The whole plan as plain text."""
        said = [f"{name}: {value}" for name, value in self.rows()]
        said += [f"Assumed: {sentence}" for sentence in self.assumptions]
        return said + [f"Note: {sentence}" for sentence in self.notes]

    def _parts(self) -> str:
        if self.compute_seconds is None or not self.communication_bytes:
            return ""
        return f" = {_seconds(self.compute_seconds)} computing + {_seconds(self.communication_seconds)} communicating"


def plan_for(
    config: TrainConfig,
    ranks: int,
    gpu: Gpu | Sequence[Gpu],
    *,
    nodes: int | None = None,
    link_mbit: float = 1000,
    steps: int | None = None,
    hours: float | None = None,
    mfu: float | None = None,
    corpus_tokens: int | None = None,
) -> Plan:
    """The plan of a run with `ranks` ranks on `nodes` nodes (one each, unless said).

    `gpu`: of every rank, from aura/gpus.py, or one for each rank. `steps`: in place of config.steps; `hours`: as many
    steps as fit. `mfu`: in place of what is assumed. `corpus_tokens`: of one pass. Raises ConfigError.
    """
    nodes = nodes or ranks
    devices = [gpu] * ranks if isinstance(gpu, Gpu) else list(gpu)
    sizes = config.batch_sizes(ranks)
    of_ranks = [
        _Rank(config, *each, math.ceil(ranks / nodes), mfu) for each in zip(devices, sizes, strict=True)
    ]
    fullest = max(of_ranks, key=lambda rank: rank.memory.total / rank.room)
    # The others wait for the slowest; one whose speed is not known may be it.
    slowest = max(of_ranks, key=lambda rank: math.inf if rank.seconds is None else rank.seconds)
    compute = slowest.seconds
    sent = 2 * (ranks - 1) * parameter_bytes(config) // ranks if nodes > 1 else 0
    communication = sent / (GIGABIT * link_mbit / 1000)
    tokens_per_step = sum(sizes) * config.gradient_accumulation_steps * config.seq_len
    if hours is not None:
        if compute is None:
            raise ConfigError(
                f"How far --hours go depends on the speed of {slowest.device.name}: give --peak-tflops."
            )
        steps = max(1, int(hours * 3600 / (compute + communication)))
    if steps is None and config.epochs and corpus_tokens:
        steps = math.ceil(config.epochs * corpus_tokens / tokens_per_step)
    steps = steps or config.steps
    kinds = {rank.device.name: rank for rank in of_ranks}
    assumptions = [
        *_memory_assumptions(config, fullest.device),
        *(sentence for rank in kinds.values() for sentence in rank.assumptions(config)),
        *(
            ["Communication follows the backward pass: nothing of it is hidden behind computing."]
            if sent
            else []
        ),
    ]
    notes = [
        *_note_on_memory(config, of_ranks, fullest),
        *(
            f"The speed of {name} is not known: --peak-tflops says it."
            for name, rank in kinds.items()
            if not rank.peak
        ),
        *_note_on_tokens(parameter_count(config), steps * tokens_per_step),
        *_note_on_traffic(compute, communication, config),
    ]
    peaks = [rank.peak for rank in of_ranks]
    return Plan(
        preset=config.preset,
        device=_names(devices),
        device_memory=fullest.room,
        fullest_rank=of_ranks.index(fullest),
        peak_flops=slowest.peak,
        peak_flops_of_all=None if None in peaks else sum(peak for peak in peaks if peak),
        utilisation=slowest.utilisation,
        nodes=nodes,
        ranks=ranks,
        link_mbit=link_mbit,
        parameters=parameter_count(config),
        memory=fullest.memory,
        sequences_per_step=sum(config.shares(ranks)),
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(config),
        compute_seconds=compute,
        communication_bytes=sent,
        communication_seconds=communication,
        checkpoint_bytes=checkpoint_bytes(config),
        checkpoints_on_disk=config.keep_checkpoints + 2,  # the best one, and one that is being written
        steps=steps,
        passes=steps * tokens_per_step / corpus_tokens if corpus_tokens else None,
        assumptions=tuple(assumptions),
        notes=tuple(notes),
    )


class _Rank:
    """What one rank needs and has: memory [bytes], and the time that it computes in one step [s]."""

    def __init__(
        self, config: TrainConfig, device: Gpu, micro_batch: int, on_its_node: int, mfu: float | None
    ) -> None:
        sharing = 1 if device.is_gpu else on_its_node  # the ranks of one node share its processor
        self.device, self.room = device, device.memory / sharing
        self.memory = memory_of(config, micro_batch, device.is_gpu)
        self.peak = device.peak.get(config.precision)
        self.utilisation, self.why = utilisation(config, device, mfu)
        self.seconds: float | None = None
        if self.peak:
            tokens = micro_batch * config.gradient_accumulation_steps * config.seq_len
            self.seconds = tokens * flops_per_token(config) * sharing / (self.peak * self.utilisation)

    def assumptions(self, config: TrainConfig) -> Iterator[str]:
        if self.peak:
            speed = f"{self.peak / 1e12:.3g} TFLOP/s in {config.precision}"
            yield f"{self.device.name}: {speed} ({self.device.source})."
            yield self.why


def _names(devices: list[Gpu]) -> str:
    """'RTX 3060', or '1 x RTX 3090, 4 x RTX 3060'."""
    counts = Counter(device.name for device in devices)
    if len(counts) == 1:
        return devices[0].name
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def compare(plan: Plan, measured_seconds_per_step: float, measured_peak_bytes: int | None) -> str:
    """One line after the run. `measured_peak_bytes`: torch.cuda.max_memory_allocated(); None on a CPU."""
    words = []
    if (predicted := plan.seconds_per_step) is not None:
        words.append(
            f"{_seconds(predicted)} per step, measured {_seconds(measured_seconds_per_step)} "
            f"({measured_seconds_per_step / predicted - 1:+.0%})"
        )
    else:
        words.append(f"no time per step, measured {_seconds(measured_seconds_per_step)}")
    if measured_peak_bytes is not None:
        words.append(
            f"{_gib(plan.memory.tensors)} of tensors, measured {_gib(measured_peak_bytes)} "
            f"({measured_peak_bytes / plan.memory.tensors - 1:+.0%})"
        )
    return f"Predicted: {'; '.join(words)}."


def _memory_assumptions(config: TrainConfig, gpu: Gpu) -> Iterator[str]:
    if gpu.is_gpu:
        yield "0.6 GiB of GPU memory for the driver and CUDA; gaps of torch's allocator are not counted."
    if config.dropout:
        yield "The masks of dropout are not counted in the memory."


def _note_on_memory(config: TrainConfig, of_ranks: list[_Rank], fullest: _Rank) -> Iterator[str]:
    if fullest.memory.total <= fullest.room:
        return
    device = fullest.device
    alike = len({rank.room for rank in of_ranks}) == 1
    what = f"It does not fit {_gib(fullest.room)}"
    if not alike:
        what = f"Rank {of_ranks.index(fullest)} ({device.name}): it does not fit {_gib(fullest.room)}"
    rooms = [rank.room for rank in of_ranks]
    changes = settings_that_fit(config, rooms, any(rank.device.is_gpu for rank in of_ranks))
    if changes is None:
        yield f"{what}, and no setting makes it fit: take a smaller model."
    else:
        words = " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())
        yield f"{what}. This would: {words}."


def _note_on_tokens(parameters: int, tokens: int) -> Iterator[str]:
    ratio = tokens / parameters
    if ratio < ENOUGH_TOKENS / 2:
        yield (
            f"{ratio:.2g} tokens per parameter are far below {ENOUGH_TOKENS} (Hoffmann et al. 2022): with the same "
            "computing time a smaller model would learn more."
        )


def _note_on_traffic(compute: float | None, communication: float, config: TrainConfig) -> Iterator[str]:
    if compute is not None and communication > 1.1 * compute:
        yield (
            f"The link takes {communication / compute:.1f} times as long as the computing: raise "
            f"gradient_accumulation_steps (now {config.gradient_accumulation_steps}), or take fewer nodes."
        )


def _gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= 0.1 * GIB else f"{value / 2**20:.1f} MiB"


def _size(value: float) -> str:
    """As disks and networks are sold."""
    return f"{value / 1e9:.3g} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} s"


def duration(seconds: float | None) -> str:
    """'71.9 hours', or in the unit that suits."""
    if seconds is None:
        return "unknown time"
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size and (unit != "days" or seconds >= 5 * size):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
