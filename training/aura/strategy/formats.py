"""What goes over the wire for the gradients and the weights of a round: as they are, or in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aura.config import TrainConfig
from aura.strategy.codec import FLOATS, bytes_of, decode, encode


class WireFormat(Protocol):
    @property
    def changes(self) -> bool:
        """Leg 2 carries what is added to the weights, not the weights."""

    @property
    def master(self) -> bool:
        """The owner keeps weights of its own in fp32: it adds to everybody's what these lack, so that no error of the
        wire is there to stay."""

    def units(self, elements: int) -> int:
        """How many elements of a packed tensor so many numbers are."""

    def pack(self, groups: list[list[Tensor]]) -> Tensor:
        """One flat tensor of all groups, one after the other; a group is what one rank gets."""

    def unpack(self, received: Tensor, elements: list[int]) -> list[Tensor]:
        """A flat tensor for each group, of so many elements."""


@dataclass(frozen=True)
class Plain:
    """In a format of torch's."""

    format: torch.dtype
    changes: bool
    master: bool = False

    def units(self, elements: int) -> int:
        return elements

    def pack(self, groups: list[list[Tensor]]) -> Tensor:
        return torch.cat([part for group in groups for part in group]).to(self.format)

    def unpack(self, received: Tensor, elements: list[int]) -> list[Tensor]:
        return list(torch.split(received, elements))


@dataclass(frozen=True)
class Quantised:
    """Integer codes and scales as bytes, see codec.py."""

    format: str
    changes: bool = True
    master: bool = True

    def units(self, elements: int) -> int:
        return bytes_of(self.format, elements)

    def pack(self, groups: list[list[Tensor]]) -> Tensor:
        return torch.cat([encode(torch.cat(group).float(), self.format) for group in groups])

    def unpack(self, received: Tensor, elements: list[int]) -> list[Tensor]:
        parts = torch.split(received, [self.units(count) for count in elements])
        return [decode(part, self.format, count) for part, count in zip(parts, elements, strict=True)]


def format_of(config: TrainConfig, parameters: torch.dtype) -> WireFormat:
    """parameters: their format, which is that of gradients; a wider one on the wire would say nothing more."""
    if config.wire not in FLOATS:
        return Quantised(config.wire)
    narrow = min(FLOATS[config.wire], parameters, key=lambda format_: torch.finfo(format_).bits)
    # In bf16, weights would lose the small changes; the changes themselves only lose their last bits.
    changes = torch.finfo(narrow).bits < torch.finfo(parameters).bits
    # While there is a delay, everybody's weights are in use when the owner makes new ones.
    return Plain(narrow, changes, master=config.delay > 0)
