"""Who owns which elements of the parameters, and in which buckets they go over the wire.

Newton-Schulz needs a matrix whole, so its owner has all of it. Everything else is updated element by element and is
cut so that all owners have the same number of elements. All orders are that of the backward pass, which makes the
gradient of the last layer first; they depend on nothing but the shapes and the number of ranks. No communication here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aura.optim.adamw import BLOCK

# Elementwise parameters are cut at multiples of this from their first element: an int8 moment's scale, and any scale
# of 128 elements on the wire, then has one owner.
GRAIN = BLOCK
# A parameter smaller than this part of an owner's share stays whole: to cut it would only cost operations.
SMALL = 1 / 256


@dataclass(frozen=True)
class Shard:
    """The elements [start, stop) of a flattened parameter."""

    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """What is exchanged at once: of the stream of every owner the elements [start, stops[owner])."""

    start: int
    stops: tuple[int, ...]
    shards: tuple[tuple[Shard, ...], ...]  # of every owner

    @property
    def lengths(self) -> list[int]:
        """Elements of every owner."""
        return [stop - self.start for stop in self.stops]

    @property
    def names(self) -> set[str]:
        return {shard.name for shards in self.shards for shard in shards}


def owners(shapes: Mapping[str, tuple[int, ...]], whole: Mapping[str, int], ranks: int) -> list[list[Shard]]:
    """The stream of every owner: its segments in the order of the backward pass.

    shapes: of all parameters, in the order of the forward pass. whole: the parameters that Newton-Schulz needs whole,
    and of how many matrices below one another each consists (c_attn: 3).
    """
    backward = {name: place for place, name in enumerate(reversed(list(shapes)))}
    owned: list[list[Shard]] = [[] for _ in range(ranks)]
    load = [0] * ranks  # elements
    _deal_matrices(shapes, {name: whole[name] for name in backward if name in whole}, owned, load)
    rest = {name: math.prod(shapes[name]) for name in backward if name not in whole}
    share = (sum(load) + sum(rest.values())) / ranks
    small = {name: count for name, count in rest.items() if count < SMALL * share}
    for name, count in small.items():
        owner = load.index(min(load))
        owned[owner].append(Shard(name, 0, count))
        load[owner] += count
    large = {name: count for name, count in rest.items() if name not in small}
    level = _water_level(load, sum(large.values()))
    needs = [max(0.0, level - of_owner) for of_owner in load]
    for name, count in large.items():
        for owner, shard in enumerate(_split(name, count, needs)):
            if shard:
                owned[owner].append(shard)
                needs[owner] = max(0.0, needs[owner] - len(shard))
    for stream in owned:
        # Of one parameter the last rows first, as it is for the parameters.
        stream.sort(key=lambda shard: (backward[shard.name], -shard.start))
    return owned


def newton_schulz_work(rows: int, columns: int) -> int:
    """Multiplications of one iteration: x x', its square, and their product with x."""
    short, long = min(rows, columns), max(rows, columns)
    return 2 * short * short * long + short**3


def _deal_matrices(
    shapes: Mapping[str, tuple[int, ...]],
    whole: Mapping[str, int],
    owned: list[list[Shard]],
    load: list[int],
) -> None:
    """Each to the owner with the least Newton-Schulz work so far, the largest first (LPT, Graham 1969)."""
    work = [0] * len(owned)
    matrices: list[tuple[int, Shard]] = []
    for name, parts in whole.items():
        rows, columns = shapes[name]
        size = rows // parts * columns
        cost = newton_schulz_work(rows // parts, columns)
        matrices += [(cost, Shard(name, i * size, (i + 1) * size)) for i in reversed(range(parts))]
    for cost, shard in sorted(matrices, key=lambda matrix: -matrix[0]):
        owner = min(range(len(owned)), key=lambda rank: (work[rank], load[rank]))
        owned[owner].append(shard)
        work[owner] += cost
        load[owner] += len(shard)


def _water_level(load: list[int], amount: int) -> float:
    """How many elements the owners below the level have, when `amount` more have made them equal."""
    level = 0.0
    for count, height in enumerate(sorted(load), 1):
        if count > 1 and height >= level:
            break
        level = (sum(sorted(load)[:count]) + amount) / count
    return level


def _split(name: str, count: int, needs: list[float]) -> Iterator[Shard | None]:
    """`count` elements in proportion to what the owners need, cut at multiples of GRAIN."""
    grains, total = math.ceil(count / GRAIN), sum(needs)
    start, so_far = 0, 0.0
    for need in needs:
        so_far += need
        stop = min(count, round(grains * min(1.0, so_far / total)) * GRAIN)
        yield Shard(name, start, stop) if stop > start else None
        start = stop


def cut_into_buckets(owned: list[list[Shard]], count: int) -> list[Bucket]:
    """The streams cut into `count` buckets of equal length (fewer, where they are shorter than GRAIN x `count`).

    In all but the last buckets every owner takes part, so that no rank has to send everything to one port.
    """
    longest = max(sum(map(len, stream)) for stream in owned)
    step = max(1, math.ceil(longest / (count * GRAIN))) * GRAIN
    cut = []
    for start in range(0, longest, step):
        shards = tuple(tuple(_between(stream, start, start + step)) for stream in owned)
        cut.append(Bucket(start, tuple(start + sum(map(len, part)) for part in shards), shards))
    return cut


def _between(stream: list[Shard], start: int, stop: int) -> Iterator[Shard]:
    """What of a stream lies between two places in it."""
    place = 0
    for shard in stream:
        first, last = max(start, place), min(stop, place + len(shard))
        if first < last:
            shift = shard.start - place
            yield Shard(shard.name, first + shift, last + shift)
        place += len(shard)
