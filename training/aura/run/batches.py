"""What this rank computes in a step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aura.config import TrainConfig
from aura.corpus.sequences import Order, Sequences, share_of
from aura.model.forward import to_device
from aura.run.division import Division


@dataclass(frozen=True)
class MicroBatch:
    inputs: Tensor  # token ids, int64 (sequences, seq_len)
    targets: Tensor  # the same
    is_last: bool  # of this rank in this step


class Batches:
    """The share of one rank of the sequences of every step, in micro-batches."""

    def __init__(
        self, sequences: Sequences, config: TrainConfig, division: Division, rank: int, device: torch.device
    ) -> None:
        self.sequences, self.config, self.device = sequences, config, device
        self.division, self.rank, self.size = division, rank, division.sizes[rank]
        self.order = Order(len(sequences), config.seed)
        self.per_step = sum(division.first)  # sequences of all ranks, in every step
        # Read ahead, and its position
        self.ahead: tuple[int, tuple[Tensor, Tensor]] | None = None

    def begin_step(self, step: int) -> None:
        """What follows is asked for this step (from 1)."""
        self.step = step
        self.offset, self.share = share_of(self.rank, self.division.of_step(step))
        self.tokens = 0  # that this rank has been given of this step
        # So many micro-batches are computed before the weights of the step before are there.
        # With rounds it is steps that are late.
        has_delay = len(self.division.first) > 1 and self.config.strategy != "rounds"
        has_delay &= step > self.config.delay_after
        delay = self.config.delay if has_delay else 0
        self.stale = math.ceil(delay * math.ceil(self.share / self.size))

    def prepare(self, windows_seen: int) -> None:
        """Read the first micro-batch of the next step, which begins behind so many sequences, and begin to copy it."""
        offset, share = share_of(self.rank, self.division.of_step(self.step + 1))
        position = windows_seen + offset
        self.ahead = position, self._read(position, min(self.size, share))

    @property
    def accumulates(self) -> bool:
        """Has a step of this rank more than one micro-batch, or may it have?"""
        return self.division.by_speed or self.division.first[self.rank] > self.size

    @property
    def largest(self) -> int:
        """Windows of this rank's largest micro-batch."""
        return self.size if self.division.by_speed else min(self.size, self.division.first[self.rank])

    def _read(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        batch = self.sequences.batch(self.order.at(position, count))
        return to_device(batch, self.device)

    def of_step(self, windows_seen: int) -> Iterator[MicroBatch]:
        """Those of the step, which begins behind so many sequences. With dropout, torch's generators are seeded before
        each one: compute its forward pass before asking for the next."""
        begin = windows_seen + self.offset
        for first in range(0, self.share, self.size):
            position = begin + first
            if self.ahead and self.ahead[0] == position:
                inputs, targets = self.ahead[1]
            else:
                inputs, targets = self._read(position, min(self.size, self.share - first))
            self.tokens += targets.numel()
            if self.config.dropout:
                torch.manual_seed(_seed(self.config.seed, position))
            yield MicroBatch(inputs, targets, is_last=first + self.size >= self.share)


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
