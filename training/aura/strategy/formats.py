"""What goes over the wire for the gradients and the weights of a round: as they are, or in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aura.config import TrainConfig
from aura.strategy.codec import FLOATS, bytes_of, decode, encode


@dataclass(frozen=True)
class WireFormat:
    format: str | torch.dtype  # of integer codes and scales as bytes, see codec.py; or one of torch's
    changes: bool = True  # the all-gather carries what is added to the weights, not the weights
    # The owner keeps weights of its own in fp32: it adds to everybody's what these lack, so that no error of the wire
    # is there to stay.
    master: bool = True

    def units(self, elements: int) -> int:
        """How many elements of a packed tensor so many numbers are."""
        return bytes_of(self.format, elements) if isinstance(self.format, str) else elements

    def pack(self, groups: list[list[Tensor]]) -> Tensor:
        """One flat tensor of all groups, one after the other; a group is what one rank gets."""
        if isinstance(self.format, str):
            return torch.cat([encode(torch.cat(group).float(), self.format) for group in groups])
        return torch.cat([part for group in groups for part in group]).to(self.format)

    def unpack(self, received: Tensor, elements: list[int]) -> list[Tensor]:
        """A flat tensor for each group, of so many elements."""
        parts = torch.split(received, [self.units(count) for count in elements])
        if not isinstance(self.format, str):
            return list(parts)
        return [decode(part, self.format, count) for part, count in zip(parts, elements, strict=True)]


def format_of(config: TrainConfig, parameters: torch.dtype) -> WireFormat:
    """parameters: their format, which is that of gradients; a wider one on the wire would say nothing more."""
    if config.wire not in FLOATS:
        return WireFormat(config.wire)
    narrow = min(FLOATS[config.wire], parameters, key=lambda format_: torch.finfo(format_).bits)
    # In bf16, weights would lose the small changes; the changes themselves only lose their last bits.
    changes = torch.finfo(narrow).bits < torch.finfo(parameters).bits
    # While there is a delay, everybody's weights are in use when the owner makes new ones. In bf16 an outer step of
    # rounds would be rounded to nearest.
    rounds = config.strategy == "rounds" and parameters == torch.bfloat16
    return WireFormat(narrow, changes, master=config.delay > 0 or rounds)
