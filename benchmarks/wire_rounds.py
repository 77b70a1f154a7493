"""The trainer's `rounds` as one of the ways of `make bench-wire`: local steps on the same clocks, and exchanges over
the same links. Nobody's weights move: all bytes are there, and the processor has less to do."""

from __future__ import annotations

import time

import torch
from aura.cluster.ranks import Ranks
from aura.strategy import sharded
from aura.strategy.interface import Told
from aura.strategy.rounds import Rounds
from waits import Gpu, Model, Update, Waiting
from wire_arms import Task, lengths, scaled


class InRounds:
    def __init__(self, task: Task, rank: int) -> None:
        arm, waits = task.arm, lengths(task.arm, task.mfu)
        config = scaled(arm.config(), task.scale)
        self.micro_batches, self.gpu = waits.micro_batches[rank], Gpu()
        self.tokens = waits.shares[rank] * arm.config().seq_len
        sharded.ROUND_BYTES //= task.scale  # as many pieces as at full size
        self.model = Model(config, self.gpu)
        self.model.fill(rank)
        nodes = [f"node{number}" for number in range(arm.nodes)]
        ranks = Ranks(rank, nodes, torch.device("cpu"), Waiting(self.gpu))
        self.strategy = Rounds(self.model, ranks, config)
        self.strategy.optimizer = Update([], self.gpu, waits.update[rank])
        self.strategy.start()
        self.gpu.nothing_before(time.perf_counter())

    def step(self, looked_at: bool = False) -> None:
        self.strategy.begin_step()
        for seconds in self.micro_batches:
            self.gpu.work(seconds)
        with self.strategy.last_backward():
            pass
        told = Told(float(self.tokens), self.tokens, looked_at=looked_at)
        assert not self.strategy.apply(told, 0.0)().left_out, "something is not finite"

    def end(self) -> bool:
        self.step(looked_at=True)
        equal = not self.strategy.compare()
        self.strategy.close()
        return equal
