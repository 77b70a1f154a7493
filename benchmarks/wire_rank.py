"""One rank of `make bench-wire`: a process that wire.py starts. What is real in it and what is not: see there."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aura.cluster.activity import Activity
from aura.cluster.ranks import Ranks
from aura.strategy import sharded
from aura.strategy.buckets import Bucket
from aura.strategy.delayed import Delayed
from aura.strategy.formats import WireFormat
from aura.strategy.interface import GlobalStepStats, LocalStepStats
from aura.strategy.rounds import Rounds
from aura.strategy.sharded import Sharded
from aura.strategy.wire import AdaptiveTimeout, Exchange
from ranks import bf16_on_the_wire, join, leave
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from waits import FORWARD, Update, Waiting, Way, moved_bytes
from wire_arms import DILOCO, Task

LR = 1e-3
BUCKET = 25  # MB, of DistributedDataParallel at full size: torch's default


class Meter:
    """What a rank measures between the end of the last step that warms up and that of the last step."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sent: Counter[str] = Counter()  # bytes by the kind of exchange
        self.busy: Counter[str] = Counter()  # seconds of the wire
        self.ends: list[float] = []  # of steps
        self.moments: list[dict[str, Any]] = []

    def step_has_ended(self) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) in (self.task.warm_up, self.task.warm_up + self.task.steps):
            at_work, ticks = machine_ticks()
            self.moments.append(
                {"busy": at_work, "all": ticks, "sent": dict(self.sent), "wire": dict(self.busy)}
            )

    @property
    def is_over(self) -> bool:
        return len(self.moments) == 2

    def count(self) -> None:
        """What all exchanges send, by kind."""
        end = Exchange.end

        def counting(exchange: Exchange) -> tuple[int, Exchange | None]:
            sent, following = end(exchange)
            self.sent[exchange.kind] += sent
            return sent, following

        Exchange.end = counting  # type: ignore[method-assign, assignment]


def machine_ticks() -> tuple[int, int]:
    """Of all cores of this machine since it runs: at work, and all."""
    words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:8]
    user, nice, system, idle, waiting, interrupts, soft_interrupts = map(int, words)
    at_work = user + nice + system + interrupts + soft_interrupts
    return at_work, at_work + idle + waiting


class Timed(AdaptiveTimeout):
    def __init__(self, longest: float, busy: Counter[str]) -> None:
        super().__init__(longest)
        self.busy = busy

    def add(self, kind: str, seconds: float) -> None:
        super().add(kind, seconds)
        self.busy[kind] += seconds  # type: ignore[assignment]


class Timestamped(Delayed):
    updated_at = 0.0  # time.perf_counter()

    def _update(self, told: LocalStepStats, lr: float) -> GlobalStepStats:
        outcome = super()._update(told, lr)
        self.updated_at = time.perf_counter()
        return outcome


class OnlyTheWire(Sharded):
    """Does nothing with what comes, and sends what `Beforehand` has kept."""

    def _step(self, factor: float | None, lr: float) -> Tensor:
        self.optimizer.step(lr)
        return self.own_shard.gradient

    def _take_in(self, round_: Bucket, received: Tensor) -> None:
        pass


class OnlyTheWireDelayed(OnlyTheWire, Timestamped):
    pass


@dataclass(frozen=True)
class Beforehand(WireFormat):
    """Encodes the first numbers of a length, and then sends these bytes again and again."""

    packed: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def pack(self, groups: list[list[Tensor]]) -> Tensor:
        key = tuple(sum(map(len, group)) for group in groups)
        if key not in self.packed:
            self.packed[key] = super().pack(groups)
        return self.packed[key]


class Ours(Way):
    """A rank of one of the trainer's strategies."""

    def __init__(self, task: Task, rank: int) -> None:
        super().__init__(task, rank)
        tokens = self.waits.shares[rank] * self.arm.config().seq_len
        self.told, self.update = LocalStepStats(float(tokens), tokens), self.waits.update[rank]
        sharded.BUCKET_BYTES //= task.scale  # as many rounds as at full size

    def ranks(self, rank: int, activity: Activity) -> Ranks:
        nodes = [f"node{number}" for number in range(self.arm.nodes)]
        return Ranks(rank, nodes, torch.device("cpu"), activity)


class InSteps(Ours):
    """In a loop as that of run/trainer.py."""

    def __init__(self, task: Task, rank: int, meter: Meter) -> None:
        super().__init__(task, rank)
        arm, self.meter = self.arm, meter
        self.moving = self.waits.moving[rank] * moved_bytes(arm.wire, arm.nodes)
        self.late = math.ceil(arm.delay * len(self.micro_batches))
        self.under_way: Callable[[], GlobalStepStats] | None = None
        only_the_wire = arm.encoded_beforehand
        if not only_the_wire:
            self.model.fill(rank)
        kinds = (OnlyTheWire, OnlyTheWireDelayed) if only_the_wire else (Sharded, Timestamped)
        ranks = self.ranks(rank, Activity() if arm.delay else Waiting(self.gpu))
        self.strategy = kinds[bool(arm.delay)](self.model, ranks, self.config)
        meter.count()
        self.strategy.wire.patience = Timed(self.config.collective_timeout, meter.busy)
        updated = [] if only_the_wire else self.strategy.own_shard.views.values()
        self.strategy.optimizer = Update(updated, self.gpu, self.update)
        if only_the_wire:
            collectives = self.strategy.collectives
            collectives.gradient_format = collectives.weight_format = Beforehand(
                **asdict(self.strategy.format)
            )
            collectives._add_up = lambda *_: None  # type: ignore[method-assign]
        self.strategy.start()
        self.gpu.nothing_before(time.perf_counter())

    def step(self) -> None:
        self.strategy.begin_step()
        for number, seconds in enumerate(self.micro_batches):
            if number == self.late:
                self.settle()
            is_first, is_last = number == 0, number == len(self.micro_batches) - 1
            self.gpu.micro_batch = seconds
            if is_last:
                loss = self.model()
                with self.strategy.last_backward():
                    loss.backward()
            elif is_first and not self.late:
                with torch.no_grad():
                    self.model()  # layer by layer, so that each waits for its weights
                self.gpu.work((1 - FORWARD) * seconds)
            else:
                self.gpu.work(seconds)
        if self.late == len(self.micro_batches):
            self.settle()
        self.gpu.queue(self.moving)
        self.under_way = self.strategy.apply(self.told, LR)
        if not self.late:
            self.settle()

    def settle(self) -> None:
        if self.under_way is None:
            return
        outcome = self.under_way()
        assert not outcome.left_out, "a gradient that is not finite"
        self.under_way = None
        if isinstance(self.strategy, Timestamped):
            # Only now could the GPU go on with new weights, however late the processor is.
            self.gpu.nothing_before(self.strategy.updated_at)
        self.strategy.apply_update(kept=False)
        self.meter.step_has_ended()

    def end(self) -> bool:
        self.settle()
        self.strategy.complete()
        equal = not self.strategy.compare()
        self.strategy.close()
        return equal


class InRounds(Ours):
    """Local steps, and an exchange once in so many of them. Nobody's weights move: all bytes are there, and the
    processor has less to do."""

    def __init__(self, task: Task, rank: int) -> None:
        super().__init__(task, rank)
        self.model.fill(rank)
        self.strategy = Rounds(self.model, self.ranks(rank, Waiting(self.gpu)), self.config)
        self.strategy.optimizer = Update([], self.gpu, self.update)
        self.strategy.start()
        self.gpu.nothing_before(time.perf_counter())

    def step(self, looked_at: bool = False) -> None:
        self.strategy.begin_step()
        for seconds in self.micro_batches:
            self.gpu.work(seconds)
        with self.strategy.last_backward():
            pass
        told = replace(self.told, looked_at=looked_at)
        assert not self.strategy.apply(told, 0.0)().left_out, "something is not finite"

    def end(self) -> bool:
        self.step(looked_at=True)
        equal = not self.strategy.compare()
        self.strategy.close()
        return equal


class Ddp(Way):
    """torch's DistributedDataParallel: every rank updates everything."""

    def __init__(self, task: Task, rank: int) -> None:
        super().__init__(task, rank)
        self.update = self.waits.whole_update * self.arm.slowness[rank]
        self.model.fill(rank)
        self.parallel = DistributedDataParallel(
            self.model,
            bucket_cap_mb=BUCKET / task.scale,
            gradient_as_bucket_view=True,
            init_sync=False,  # they are equal
        )
        if self.arm.wire == "bf16":
            self.parallel.register_comm_hook(None, bf16_on_the_wire)
        self.gpu.nothing_before(time.perf_counter())

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        for seconds in self.micro_batches[:-1]:
            self.gpu.work(seconds)
        self.gpu.micro_batch = self.micro_batches[-1]
        self.parallel().backward()
        self.gpu.work_now(self.update)

    def end(self) -> bool:
        return True  # nothing has changed them


def main() -> None:
    words, number, card, store = sys.argv[1:]
    task, rank = Task.read(words), int(number)
    join(rank, task.arm.nodes, card, store)
    meter = Meter(task)
    way: Any
    if task.arm.rival == DILOCO:
        from diloco import TorchftDiLoCo

        way = TorchftDiLoCo(task, rank, store)
    elif task.arm.local_steps:
        way = InRounds(task, rank)
    else:
        way = Ddp(task, rank) if task.arm.rival else InSteps(task, rank, meter)
    dist.barrier()
    while not meter.is_over:
        way.step()
        if not isinstance(way, InSteps):
            meter.step_has_ended()
    equal = way.end()
    result = {"ends": meter.ends[task.warm_up - 1 :], "moments": meter.moments, "equal": equal}
    (task.folder / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
