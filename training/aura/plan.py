"""What a training will need, before any training: memory, time, traffic, disk (`aura plan`; docs/plan.md).

Standard library, and rich for the table of the command line: a controller without torch can plan.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aura import gpus
from aura.auto import choose
from aura.config import AUTO, TrainConfig, add_flags, canonical, given_settings, parse_assignments, resolve
from aura.corpus import read_corpus
from aura.errors import ConfigError, Parser
from aura.flops import flops_per_token, recomputed_flops_per_token, update_flops, utilisation
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
    device_memory: float  # for one rank
    peak_flops: float | None  # per second
    utilisation: float  # the part of the peak that is assumed to be reached
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
        yield "memory of a rank", f"{room}, at its highest ({self.memory.moment})"
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
    gpu: Gpu,
    *,
    nodes: int | None = None,
    link_mbit: float = 1000,
    steps: int | None = None,
    hours: float | None = None,
    mfu: float | None = None,
) -> Plan:
    """The plan of a run with `ranks` ranks on `nodes` nodes (one each, unless said).

    `gpu`: of every rank, from aura/gpus.py. `steps`: in place of config.steps; `hours`: as many steps as fit.
    `mfu`: in place of what is assumed. Raises ConfigError.
    """
    nodes = nodes or ranks
    sizes = config.batch_sizes(ranks)
    memory = memory_of(config, max(sizes), gpu.is_gpu)
    sharing = 1 if gpu.is_gpu else math.ceil(ranks / nodes)  # the ranks of one node share its processor
    peak = gpu.peak.get("bf16" if config.parameter_format == "bf16" else config.precision)
    reached, why = utilisation(config, gpu, mfu)
    compute = None
    if peak:
        tokens_of_slowest = max(sizes) * config.gradient_accumulation_steps * config.seq_len
        work = flops_per_token(config) + recomputed_flops_per_token(config)
        compute = (tokens_of_slowest * work + update_flops(config)) * sharing / (peak * reached)
    sent = 2 * (ranks - 1) * parameter_bytes(config) // ranks if nodes > 1 else 0
    communication = sent / (GIGABIT * link_mbit / 1000)
    tokens_per_step = sum(sizes) * config.gradient_accumulation_steps * config.seq_len
    if hours is not None:
        if compute is None:
            raise ConfigError(f"How far --hours go depends on the speed of {gpu.name}: give --peak-tflops.")
        steps = max(1, int(hours * 3600 / (compute + communication)))
    room = gpu.memory / sharing
    steps = steps or config.steps
    assumptions = [
        *_memory_assumptions(config, gpu),
        *(
            [f"{gpu.name}: {peak / 1e12:.3g} TFLOP/s in {config.precision} ({gpu.source}).", why]
            if peak
            else []
        ),
        *(
            ["Communication follows the backward pass: nothing of it is hidden behind computing."]
            if sent
            else []
        ),
    ]
    notes = [
        *_note_on_memory(config, memory, room, gpu),
        *([] if peak else [f"The speed of {gpu.name} is not known: --peak-tflops says it."]),
        *_note_on_tokens(parameter_count(config), steps * tokens_per_step),
        *_note_on_traffic(compute, communication, config),
    ]
    return Plan(
        preset=config.preset,
        device=gpu.name,
        device_memory=room,
        peak_flops=peak,
        utilisation=reached,
        nodes=nodes,
        ranks=ranks,
        link_mbit=link_mbit,
        parameters=parameter_count(config),
        memory=memory,
        sequences_per_step=sum(config.shares(ranks)),
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(config),
        compute_seconds=compute,
        communication_bytes=sent,
        communication_seconds=communication,
        checkpoint_bytes=checkpoint_bytes(config),
        checkpoints_on_disk=config.keep_checkpoints + 2,  # the best one, and one that is being written
        steps=steps,
        assumptions=tuple(assumptions),
        notes=tuple(notes),
    )


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


def _note_on_memory(config: TrainConfig, memory: Memory, room: float, gpu: Gpu) -> Iterator[str]:
    if memory.total <= room:
        return
    changes = settings_that_fit(config, room, gpu.is_gpu)
    if changes is None:
        yield f"It does not fit {_gib(room)}, and no setting makes it fit: take a smaller model."
    else:
        words = " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())
        yield f"It does not fit {_gib(room)}. This would: {words}."


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


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    overrides = canonical(given_settings(arguments) | parse_assignments(arguments.set))
    gpu, found = _device(arguments.gpu, arguments.peak_tflops, arguments.memory_gb)
    preset = str(overrides.pop("preset", arguments.preset))
    if preset == AUTO:
        preset, reason = choose(found, overrides)
        print(reason, file=sys.stderr)
    config = resolve(preset, overrides)
    if config.epochs and not (arguments.tokens or arguments.hours or arguments.corpus):
        raise ConfigError(
            f"epochs={config.epochs:g} are passes over a corpus: name it with --corpus, or give --tokens or --hours."
        )
    ranks = arguments.nodes * arguments.ranks_per_node
    steps = None
    tokens_per_step = sum(config.shares(ranks)) * config.seq_len
    if arguments.tokens:
        steps = math.ceil(arguments.tokens / tokens_per_step)
    elif arguments.corpus:
        steps = math.ceil(
            (config.epochs or 1) * read_corpus(arguments.corpus).tokens["train"] / tokens_per_step
        )
    plan = plan_for(
        config,
        ranks,
        gpu,
        nodes=arguments.nodes,
        link_mbit=arguments.link,
        steps=steps,
        hours=arguments.hours,
        mfu=arguments.mfu,
    )
    if arguments.json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        _show(plan)
    return 0


def _device(name: str | None, tflops: float | None, memory_gb: float | None) -> tuple[Gpu, list[gpus.Found]]:
    """The GPU that is planned for, and what `auto` has to choose by. Without a name: what this machine has."""
    if tflops and memory_gb:
        gpu = gpus.described(name or "a GPU", tflops, memory_gb * GIB)
    elif tflops or memory_gb:
        raise ConfigError("--peak-tflops and --memory-gb belong together: give both.")
    elif name and name != "cpu":
        gpu = gpus.find(name)
    elif not name and (found := gpus.of_this_machine()):
        best = max(found, key=lambda gpu: gpu.free)
        return gpus.called(best.name, best.total), found
    else:
        return gpus.cpu(), []
    return gpu, [gpus.Found(gpu.name, int(gpu.memory), int(gpu.memory))]


def _show(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in plan.rows():
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    for sentence in plan.assumptions:
        console.print(f"[dim]Assumed:[/dim] {sentence}", soft_wrap=True)
    for sentence in plan.notes:
        console.print(f"[bold]Note:[/bold] {sentence}", soft_wrap=True)


def _parser() -> Parser:
    parser = Parser(
        prog="aura plan",
        description="Predict what a training needs: memory, time, traffic, disk. Nothing is trained.",
    )
    add_flags(parser)
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="SETTING=VALUE", help="replace settings"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="of every rank, such as 3060, or cpu (this machine's best)"
    )
    parser.add_argument("--peak-tflops", type=number, metavar="X", help="of a GPU that is not in the table")
    parser.add_argument("--memory-gb", type=number, metavar="GB", help="of a GPU that is not in the table")
    parser.add_argument(
        "--mfu", type=fraction, metavar="X", help="part of the peak that is reached, such as 0.4"
    )
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="PCs (1)")
    parser.add_argument("--ranks-per-node", type=count, default=1, metavar="K", help="GPUs of each (1)")
    parser.add_argument("--link", type=number, default=1000, metavar="MBIT", help="of each node (1000)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=number, metavar="N", help="length of the run, such as 2.5e9")
    length.add_argument("--hours", type=number, metavar="H", help="length of the run")
    length.add_argument(
        "--corpus", type=Path, metavar="DIR", help="`epochs` passes over it (one where epochs is 0)"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return value


def fraction(text: str) -> float:
    if (value := number(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} must be at most 1")
    return value


def count(text: str) -> int:
    if (value := number(text)) != int(value):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number")
    return int(value)
