"""The state of an optimizer whose elements many ranks own, put together on the ranks that want all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aura.cluster.ranks import collective
from aura.strategy.buckets import Shard
from aura.strategy.owner_shard import Named
from aura.strategy.state import Allocate, empty, in_memory, key, unit_of

CHUNK = 4 * 2**20  # bytes of every rank that are on their way at once


def outline_of(parameters: Mapping[str, Tensor]) -> Named:
    """Of every parameter one element. An optimizer of it says what its state consists of; torch's device `meta` would
    say it too, but to import that takes half a second."""
    outlines = {name: torch.zeros([1] * p.dim(), dtype=p.dtype) for name, p in parameters.items()}
    return Named({name: nn.Parameter(one, requires_grad=False) for name, one in outlines.items()})


def shapes_of(
    parameters: Mapping[str, Tensor], outlined: Mapping[str, Tensor]
) -> dict[str, tuple[list[int], torch.dtype]]:
    """Shapes and number formats of the whole state. outlined: the state of an optimizer of the outline."""
    shapes = {}
    for text, tensor in outlined.items():
        name, _, kind = text.rpartition(".")
        parameter, unit = parameters[name], unit_of(kind)
        if not unit:
            shape: list[int] = []
        elif unit == 1:
            shape = list(parameter.shape)
        else:
            shape = [len(tensor), ceil(parameter.numel() / unit)]
        shapes[text] = shape, tensor.dtype
    return shapes


def full_state_dict(
    group: dist.ProcessGroup,
    owned: Sequence[Sequence[Shard]],
    part: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[list[int], torch.dtype]],
    wanted: Allocate | None,
) -> Callable[[], dict[str, Tensor]]:
    """What exchanges the state and returns it by whole parameters, in what `wanted` gives; nothing where that is None.

    All ranks have to call what they get, which may take its time beside further steps: this rank's part of the state
    is copied now. group: of gloo, that nobody else uses meanwhile. owned: the segments of every rank. part: what this
    rank has of the state, by `key`. shapes: see `shapes_of`. Every rank sends its part to all, a chunk at a time: what
    a rank needs beside the result is the copy of its part and a few chunks. Where there is no room for the result, it
    takes part to the end and then raises OSError.
    """
    kinds: dict[str, list[str]] = {}
    for name in shapes:
        parameter, _, kind = name.rpartition(".")
        kinds.setdefault(parameter, []).append(kind)
    mine = _bytes_of(part, owned[group.rank()], kinds, wanted or in_memory)
    regions = [list(_regions(shards, kinds, shapes)) for shards in owned]
    lengths = [sum(last - first for _, first, last in of_rank) for of_rank in regions]

    def collect() -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        lacks: OSError | None = None
        try:
            if wanted:
                result = {name: empty(shape, kind, wanted) for name, (shape, kind) in shapes.items()}
        except OSError as error:
            result, lacks = {}, error
        flat = {name: tensor.view(-1).view(torch.uint8) for name, tensor in result.items()}
        targets = [
            deque(flat[name][first:last] for name, first, last in of_rank if result) for of_rank in regions
        ]
        for start in range(0, max(lengths), CHUNK):
            chunk = torch.zeros(min(CHUNK, max(lengths) - start), dtype=torch.uint8)
            sent = mine[start : start + CHUNK]
            chunk[: len(sent)] = sent
            received = [torch.empty_like(chunk) for _ in owned]
            with collective():
                dist.all_gather(received, chunk, group=group)
            for target, length, of_rank in zip(targets, lengths, received, strict=True):
                if result:
                    _pour(of_rank[: max(0, length - start)], target)
        if lacks:
            raise lacks
        return result

    return collect


def _bytes_of(
    part: Mapping[str, Tensor],
    shards: Sequence[Shard],
    kinds: dict[str, list[str]],
    allocate: Allocate,
) -> Tensor:
    """In the order of `_regions`. Raises OSError."""
    tensors = [part[key(shard, kind)] for shard in shards for kind in kinds[shard.name]]
    result, start = allocate(sum(tensor.nbytes for tensor in tensors)), 0
    for tensor in tensors:
        result[start : start + tensor.nbytes] = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        start += tensor.nbytes
    return result


def _regions(
    shards: Sequence[Shard],
    kinds: Mapping[str, list[str]],
    shapes: Mapping[str, tuple[list[int], torch.dtype]],
) -> Iterator[tuple[str, int, int]]:
    """Where the state of these segments belongs, in their order: the name of a whole tensor, and the bytes of it from
    the first to before the last."""
    for shard in shards:
        for kind in kinds[shard.name]:
            name, unit = f"{shard.name}.{kind}", unit_of(kind)
            shape, size = shapes[name][0], shapes[name][1].itemsize
            if not unit:
                yield name, 0, size
                continue
            rows, columns = (shape[0], shape[1]) if unit > 1 else (1, 0)
            for row in range(rows):
                first, last = shard.start // unit, ceil(shard.stop / unit)
                yield name, (row * columns + first) * size, (row * columns + last) * size


def _pour(received: Tensor, targets: deque[Tensor]) -> None:
    """Into the targets, one after the other; what is filled leaves."""
    while len(received):
        target = targets.popleft()
        count = min(len(target), len(received))
        target[:count] = received[:count]
        received = received[count:]
        if count < len(target):
            targets.appendleft(target[count:])
