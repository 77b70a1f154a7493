"""What this rank computes in a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aura.config import TrainConfig
from aura.corpus.windows import Order, Windows, share_of
from aura.model.forward import to_device


@dataclass(frozen=True)
class MicroBatch:
    inputs: Tensor  # token ids, int64 (windows, seq_len)
    targets: Tensor  # the same
    is_last: bool  # of this rank in this step


class Batches:
    """The share of one rank of the windows of every step, in micro-batches."""

    def __init__(
        self, windows: Windows, config: TrainConfig, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.windows, self.config, self.device = windows, config, device
        self.order = Order(len(windows), config.seed)
        shares = config.shares(world_size)
        self.per_step = sum(shares)  # windows of all ranks
        self.offset, self.share = share_of(rank, shares)
        self.tokens = self.share * config.seq_len  # of this rank in one step
        # torch draws for a whole tensor: what is dropped of one window follows from its position alone only where it
        # is computed alone. So the same windows learn the same, whoever computes them, and in whatever company.
        self.size = 1 if config.dropout else config.batch_sizes(world_size)[rank]
        # Read ahead, and its position
        self.ahead: tuple[int, tuple[Tensor, Tensor]] | None = None

    def prepare(self, windows_seen: int) -> None:
        """Read the first micro-batch of the step that begins behind so many windows, and begin to copy it."""
        position = windows_seen + self.offset
        self.ahead = position, self._read(position, min(self.size, self.share))

    def _read(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        return to_device(self.windows.batch(self.order.at(position, count)), self.device)

    def of_step(self, windows_seen: int) -> Iterator[MicroBatch]:
        """Those of the step that begins behind so many windows. With dropout, torch's generators are seeded before each
        one: compute its forward pass before asking for the next."""
        begin = windows_seen + self.offset
        for first in range(0, self.share, self.size):
            position = begin + first
            if self.ahead and self.ahead[0] == position:
                inputs, targets = self.ahead[1]
            else:
                inputs, targets = self._read(position, min(self.size, self.share - first))
            if self.config.dropout:
                torch.manual_seed(_seed(self.config.seed, position))
            yield MicroBatch(inputs, targets, is_last=first + self.size >= self.share)


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
