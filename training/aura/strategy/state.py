"""The state of the optimizer by element, so that any number of ranks can go on with it.

A name says what a tensor holds: `h.0.attn.c_attn.weight.exp_avg[4096:8192]` are the first moments of these elements
of the flattened parameter, in their order. Without brackets it is the whole parameter, whatever the tensor's shape.
`.scales` (2, blocks) belong to blocks of 256 elements, `.step` to the whole parameter; `.master` are its elements as
their owners have them, where these are more exact than everybody's. Nothing else is needed to put
parts together: not who owned them, nor how many ranks there were.

A checkpoint holds the whole state by whole parameters, whoever has owned what: gather.py puts it together, and a rank
takes what it owns out of it. So any one disk is enough, and any number of ranks can go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import ceil

import torch
from torch import Tensor

from aura.errors import DataError
from aura.optim.adamw import BLOCK
from aura.strategy.pieces import Segment

MASTER = "master"
NAME = re.compile(r"(?P<name>.+)\.(?P<kind>\w+?)(\[(?P<start>\d+):(?P<stop>\d+)\])?")


def key(segment: Segment, kind: str) -> str:
    return f"{segment.name}.{kind}[{segment.start}:{segment.stop}]"


def put_together(
    wanted: Mapping[str, tuple[Segment, str, Tensor]], parts: Iterable[Mapping[str, Tensor]]
) -> None:
    """Overwrite the wanted tensors, each of a segment and a kind, with what the parts have of them.

    Raises DataError when something is in none of them.
    """
    found: dict[tuple[str, str], list[tuple[Segment, Tensor]]] = {}
    for part in parts:
        for text, tensor in part.items():
            segment, kind = _read(text, tensor)
            found.setdefault((segment.name, kind), []).append((segment, tensor))
    for text, (segment, kind, target) in wanted.items():
        unit, sources = unit_of(kind), found.get((segment.name, kind), [])
        covered = _fill(segment, target, sources, unit)
        if covered is not None:
            raise DataError("shard_missing", name=text, element=covered)


def _read(text: str, tensor: Tensor) -> tuple[Segment, str]:
    match = NAME.fullmatch(text)
    if not match:
        raise DataError("no_state_name", name=text)
    start, stop = match["start"], match["stop"]
    length = tensor.shape[-1] * BLOCK if match["kind"] == "scales" else tensor.numel()
    return Segment(match["name"], int(start or 0), int(stop) if stop else length), match["kind"]


def unit_of(kind: str) -> int:
    """Elements of the parameter for one of the tensor; 0: it belongs to all of them."""
    return {"scales": BLOCK, "step": 0}.get(kind, 1)


def _fill(segment: Segment, target: Tensor, sources: list[tuple[Segment, Tensor]], unit: int) -> int | None:
    """The first element that no source has, or None."""
    if not unit:
        if not sources:
            return segment.start
        target.copy_(sources[0][1])
        return None
    rows = target.view(-1, target.shape[-1]) if unit > 1 else target.view(1, -1)
    done = segment.start
    for source, tensor in sorted(sources, key=lambda pair: pair[0].start):
        first, last = max(done, source.start), min(segment.stop, source.stop)
        if source.start <= done < last:
            columns = tensor.reshape(len(rows), -1)
            into = slice((first - segment.start) // unit, ceil((last - segment.start) / unit))
            out_of = slice((first - source.start) // unit, ceil((last - source.start) / unit))
            rows[:, into] = columns[:, out_of].to(rows.device)
            done = last
    return done if done < segment.stop else None


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the CPU's memory."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def as_saved(tensor: Tensor, kind: str) -> Tensor:
    """Flat, but for scales, which keep a row for each moment."""
    return tensor if kind in ("scales", "step") else torch.flatten(tensor)
