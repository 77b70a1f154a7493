"""The state of the optimizer by element, so that any number of ranks can go on with it.

A checkpoint holds the whole state by whole parameters, whoever has owned what: `h.0.attn.c_attn.weight.exp_avg` are the
first moments of this parameter, `.scales` (2, blocks) belong to its blocks of 256 elements, `.step` to all of it, and
`.master` are its elements as their owners have them, where these are more exact than everybody's.
gather.py puts it together, and a rank takes what it owns out of it. So any one disk is enough, and any
number of ranks can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod

import torch
from torch import Tensor

from aura.errors import DataError
from aura.optim.adamw import BLOCK
from aura.strategy.buckets import Shard

MASTER = "master"


def key(shard: Shard, kind: str) -> str:
    """Of what an owner has of it: `.exp_avg[4096:8192]` are these elements of the flattened parameter."""
    return f"{shard.name}.{kind}[{shard.start}:{shard.stop}]"


def take(whole: Mapping[str, Tensor], shard: Shard, kind: str, target: Tensor) -> None:
    """Overwrite the target with what the whole state has of the segment. Raises DataError."""
    name, unit = f"{shard.name}.{kind}", unit_of(kind)
    found = whole.get(name, torch.empty(0))
    if unit:
        target = target.view(-1, target.shape[-1]) if unit > 1 else target.view(1, -1)
        first, last = shard.start // unit, ceil(shard.stop / unit)
        found = found.reshape(len(target), -1)[:, first:last]
    if found.shape != target.shape:
        raise DataError("state_missing", name=name)
    target.copy_(found)


def unit_of(kind: str) -> int:
    """Elements of the parameter for one of the tensor; 0: it belongs to all of them."""
    return {"scales": BLOCK, "step": 0}.get(kind, 1)


Allocate = Callable[[int], Tensor]  # so many bytes, in the CPU's memory or a file that is mapped into it


def in_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def empty(shape: Sequence[int], format_: torch.dtype, allocate: Allocate) -> Tensor:
    """Raises OSError."""
    return allocate(prod(shape) * format_.itemsize).view(format_).view(list(shape))


def copies(tensors: Mapping[str, Tensor], allocate: Allocate = in_memory) -> dict[str, Tensor]:
    """Raises OSError."""
    return {name: empty(t.shape, t.dtype, allocate).copy_(t.detach()) for name, t in tensors.items()}
