"""Ranks of the strategy `sharded` in processes of their own, over gloo on loopback, without the trainer around them."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aura.cluster.ranks import CollectiveFailed, Ranks
from aura.config import TrainConfig, resolve
from aura.model.family import model_of
from aura.strategy.alone import Alone
from aura.strategy.buckets import cut_into_buckets, owners
from aura.strategy.checksum import checksum
from aura.strategy.delayed import Delayed
from aura.strategy.interface import GlobalStepStats, LocalStepStats
from aura.strategy.rounds import Rounds
from aura.strategy.sharded import Sharded, _bucket_count, whole_matrices
from aura.strategy.state import in_memory
from ports import free_port
from safetensors.torch import load_file, save_file

FORK, SPAWN = (multiprocessing.get_context(kind) for kind in ("fork", "spawn"))
SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "d_model": 64, "seq_len": 16, "vocab_size": 120}
SMALL |= {"batch_size": 2, "lr": 1e-2}
# Called in the process of a rank, before each step, with the number of the step and what it works with.
Fault = Callable[[int, "Rank"], None]
# So slow that what a small model sends is cut into several rounds
LINK_MBIT = 1


@dataclass
class Task:
    folder: Path
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)  # after SMALL's
    first: int = 0
    steps: int = 6
    wire: str = "fp32"
    micro_batches: int = 1
    sequences: int = 10  # in a step, of all ranks
    resume_from: Path | None = None
    loss_scale: float = 1.0
    faults: dict[int, Fault] = field(default_factory=dict)  # by rank
    overlap: bool = False  # the parameters are looked at only after the last step
    unlike: tuple[int, ...] = ()  # ranks without the vector instructions of the others
    nodes: tuple[str, ...] = ()  # of every rank; one each, unless said
    links: tuple[int, ...] = ()  # of every rank [Mbit/s]; LINK_MBIT, unless said
    shares: tuple[int, ...] = ()  # sequences of every rank; as many each, unless said
    looked_at: tuple[int, ...] = ()  # behind these steps (from 1) somebody looks at the parameters

    @property
    def config(self) -> TrainConfig:
        return resolve("gpt2-nano", SMALL | {"wire": self.wire} | self.settings)


class Rank:
    """One rank at work."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank, config = task, rank, task.config
        nodes = list(task.nodes) or [f"node{number}" for number in range(task.world_size)]
        self.model = model_of(config)
        self.ranks = Ranks(rank, nodes, torch.device("cpu"))
        kind = Rounds if config.strategy == "rounds" else Delayed if config.delay else Sharded
        self.strategy: Sharded | Rounds | Alone = (
            kind(self.model, self.ranks, config) if task.world_size > 1 else Alone(self.model, config)
        )
        self.late = math.ceil(config.delay * task.micro_batches) if kind is Delayed else 0
        self.under_way: Callable[[], GlobalStepStats] | None = None
        self.outcomes: list[dict[str, Any]] = []
        self.sums: list[int] = []  # checksum of the parameters after each step
        # What faults change and see
        self.spoiled_loss = 1.0
        self.after_backward: Callable[[], None] = lambda: None
        self.seen: list[int] = []

    def batches(self, step: int) -> list[torch.Tensor]:
        """This rank's micro-batches (sequences, seq_len + 1): every sequence goes on by a step of its own."""
        config, task = self.task.config, self.task
        numbers = step * task.sequences + torch.arange(task.sequences)
        starts, strides = numbers[:, None] * 37, 1 + numbers[:, None] % 5
        tokens = (starts + strides * torch.arange(config.seq_len + 1)) % config.vocab_size
        shares = task.shares or [task.sequences // task.world_size] * task.world_size
        return list(tokens.split(list(shares))[self.rank].chunk(task.micro_batches))

    def step(self, number: int) -> None:
        batches, loss_sum = self.batches(number), 0.0
        scale = torch.tensor(self.task.loss_scale)
        self.strategy.begin_step()
        for place, batch in enumerate(batches, 1):
            if place - 1 == self.late:
                self.settle()
            loss = self.model.loss_sum(batch[:, :-1], batch[:, 1:], scale)
            with self.strategy.last_backward() if place == len(batches) else nullcontext():
                (loss * scale).backward()
            loss_sum += loss.item() * self.spoiled_loss
        self.after_backward()
        self.spoiled_loss, self.after_backward = 1.0, lambda: None
        tokens = sum(batch[:, 1:].numel() for batch in batches)
        looked_at = number + 1 in self.task.looked_at
        told = LocalStepStats(loss_sum, tokens, loss_scale=self.task.loss_scale, looked_at=looked_at)
        if self.late == len(batches):
            self.settle()
        self.under_way = self.strategy.apply(told, self.task.config.lr)
        if not self.late:
            self.settle()

    def settle(self) -> None:
        if self.under_way is None:
            return
        self.outcomes.append(asdict(self.under_way()))
        self.under_way = None
        self.strategy.apply_update(kept=False)
        if not self.task.overlap and self.strategy.is_whole:
            self.strategy.complete()
            self.sums.append(checksum(self.model.parameters()))

    def work(self) -> None:
        task = self.task
        if task.resume_from:
            for name, tensor in load_file(task.resume_from / "parameters-0.safetensors").items():
                self.model.get_parameter(name).data.copy_(tensor)
            self.strategy.load(load_file(task.resume_from / "whole-0.safetensors"))
        self.strategy.start()
        for number in range(task.first, task.first + task.steps):
            if self.rank in task.faults:
                task.faults[self.rank](number, self)
            self.step(number)
        self.settle()
        odd = self.strategy.compare()
        save_file(dict(self.model.state_dict()), task.folder / f"parameters-{self.rank}.safetensors")
        engine = self.strategy.outer if isinstance(self.strategy, Rounds) else self.strategy
        owned = engine.state() if isinstance(engine, Sharded) else engine.optimizer.tensors()
        state = {name: tensor.contiguous() for name, tensor in owned.items()}
        save_file(state, task.folder / f"shard-{self.rank}.safetensors")
        # One rank wants no whole state, as those that share a disk with another.
        collect = self.strategy.full_state_dict(in_memory if self.rank != 1 else None)
        whole = {name: tensor.contiguous() for name, tensor in collect().items()}
        save_file(whole, task.folder / f"whole-{self.rank}.safetensors")
        sent = engine.wire.sent_bytes if isinstance(engine, Sharded) else 0
        result = {"outcomes": self.outcomes, "sums": self.sums, "odd": odd, "sent": sent, "seen": self.seen}
        result["capability"] = torch.backends.cpu.get_cpu_capability()
        (task.folder / f"result-{self.rank}.json").write_text(json.dumps(result))


def batches_of(task: Task, rank: int) -> list[list[torch.Tensor]]:
    """What a rank of the task sees, by step and micro-batch."""
    one = Rank.__new__(Rank)
    one.task, one.rank = task, rank
    return [one.batches(step) for step in range(task.steps)]


def dawdle(number: int, rank: Rank) -> None:
    """A fault: weights come late, those of the output matrix last."""
    if number:
        return
    original = Sharded._take_in

    def take_in(*arguments: Any) -> None:
        time.sleep(0.02)
        original(*arguments)

    Sharded._take_in = take_in  # type: ignore[method-assign]


def start(task: Task) -> list[BaseProcess]:
    task.folder.mkdir(exist_ok=True)
    port = free_port()
    processes: list[BaseProcess] = []
    for rank in range(task.world_size):
        kind = SPAWN if rank in task.unlike else FORK
        process = kind.Process(target=_work, args=(task, rank, port), daemon=True)
        if rank in task.unlike:
            os.environ["ATEN_CPU_CAPABILITY"] = "default"
        process.start()
        os.environ.pop("ATEN_CPU_CAPABILITY", None)
        processes.append(process)
    return processes


def complete(task: Task, seconds: float = 120) -> list[dict[str, Any]]:
    """The results of all ranks."""
    for process in start(task):
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
        assert process.exitcode == 0
    return [json.loads((task.folder / f"result-{r}.json").read_text()) for r in range(task.world_size)]


def losses(result: dict[str, Any]) -> list[float]:
    return [outcome["loss_sum"] / outcome["tokens"] for outcome in result["outcomes"]]


def check_equal(results: list[dict[str, Any]], steps: int) -> None:
    assert all(result["sums"] == results[0]["sums"] and result["odd"] == [] for result in results)
    assert all(result["outcomes"] == results[0]["outcomes"] for result in results)
    assert len(set(results[0]["sums"])) == steps


def lengths(task: Task) -> list[list[int]]:
    """Elements that every owner has in every round."""
    model = model_of(task.config)
    matrices = whole_matrices(model) if task.config.optimizer == "muon" else {}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    owned = owners(shapes, matrices, task.world_size)
    return [one.lengths for one in cut_into_buckets(owned, _bucket_count(owned, task.wire, LINK_MBIT))]


def parameters(task: Task, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(task.folder / f"parameters-{rank}.safetensors")


def shards(task: Task) -> list[dict[str, torch.Tensor]]:
    return [load_file(task.folder / f"shard-{rank}.safetensors") for rank in range(task.world_size)]


def _work(task: Task, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["AURA_LINK_MBIT"] = str(task.links[rank] if task.links else LINK_MBIT)
    if task.world_size > 1:
        store = dist.TCPStore("127.0.0.1", port, task.world_size, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=task.world_size)
    try:
        Rank(task, rank).work()
    except CollectiveFailed as error:
        (task.folder / f"failed-{rank}.txt").write_text(str(error))
        os._exit(75)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: torch would wait for operations that the others do not take part in
    if task.world_size > 1:
        dist.barrier()
    os._exit(0)
