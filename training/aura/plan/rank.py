"""What one rank needs and has, and how fast a link is. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from aura.config import TrainConfig
from aura.plan.flops import flops_per_token, update_flops_of_a_rank, utilisation
from aura.plan.gpus import Gpu
from aura.plan.memory import memory_of
from aura.plan.step_time import Work
from aura.texts.console import text

GIGABIT = 117.5e6  # bytes per second of data: TCP over Ethernet with frames of 1,500 bytes


def bytes_per_second(link_mbit: float) -> float:
    return GIGABIT * link_mbit / 1000


def ranks_of(config: TrainConfig, devices: Sequence[Gpu], nodes: int, mfu: float | None) -> list[RankPlan]:
    """devices: of every rank. Raises ConfigError."""
    ranks = len(devices)
    return [
        RankPlan(config, *each, ranks, math.ceil(ranks / nodes), mfu)
        for each in zip(devices, config.batch_sizes(ranks), config.shares(ranks), strict=True)
    ]


class RankPlan:
    """What one rank needs and has: memory [bytes], and the time that it computes in one step [s]. micro_batch, and
    share of a step: sequences."""

    def __init__(
        self,
        config: TrainConfig,
        device: Gpu,
        micro_batch: int,
        share: int,
        ranks: int,
        on_its_node: int,
        mfu: float | None,
    ) -> None:
        sharing = 1 if device.is_gpu else on_its_node  # the ranks of one node share its processor
        self.device, self.room = device, device.memory / sharing
        self.memory = memory_of(config, micro_batch, device.is_gpu, ranks)
        self.peak = device.peak.get(config.precision)
        self.utilisation, self.why = utilisation(config, device, mfu)
        self.seconds: float | None = None
        self.work: Work | None = None
        if self.peak:
            speed, count = self.peak * self.utilisation / sharing, math.ceil(share / micro_batch)
            tokens = share * config.seq_len
            work = tokens * flops_per_token(config)
            self.seconds = (work + update_flops_of_a_rank(config, ranks)) / speed
            self.work = Work(count, work / speed / count, tokens / count)

    def assumptions(self, config: TrainConfig) -> Iterator[str]:
        if self.peak:
            yield text(
                "assumed_speed",
                device=self.device.name,
                teraflops=self.peak / 1e12,
                precision=config.precision,
                source=self.device.source,
            )
            yield self.why
