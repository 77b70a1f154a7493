"""The collectives of `sharded` where ranks share a node and its one link: each goes in two stages.

    reduce-scatter  inside the node every rank adds up its part of what the node's ranks have of a gradient, in the
                    order of the ranks, and in the format of the parameters; it sends the sum to the owners, in the
                    format of the wire. An owner adds up over the nodes.
    all-gather      an owner sends to every node once, to each of its ranks a part; inside the node these pass it on as
                    it came, so that all ranks decode the same bytes

So a link carries what it would with one rank on each node. With N ranks on M nodes, L of them on this one, it sends
(N - L) / N of all gradients and L (M - 1) / N of all weights, and receives the other way round: as much. Of unlike
nodes the one with most ranks sends most, since it owns most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from aura.cluster.ranks import Ranks
from aura.strategy.buckets import Bucket
from aura.strategy.codec import BLOCK
from aura.strategy.collectives import BETWEEN, Collectives, GradientSum
from aura.strategy.formats import WireFormat
from aura.strategy.wire import Exchange, Peers

INSIDE = 1  # the communicator of what stays in the node


def nodes_of(names: Sequence[str]) -> list[list[int]]:
    """The ranks of every node, in order; names: of every rank's node. The nodes in the order of their first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


def share_links(names: Sequence[str]) -> bool:
    """Are there several nodes, and several ranks on one of them?"""
    return 1 < len(set(names)) < len(names)


def cut(count: int, parts: int) -> list[int]:
    """How many of `count` elements every part has: cut at multiples of BLOCK, so that their codes and scales are the
    same in whatever number of parts. A part may be empty."""
    blocks = -(-count // BLOCK)
    places = [min(count, blocks * part // parts * BLOCK) for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(places)]


def collectives_of(
    ranks: Ranks,
    group: dist.ProcessGroup,
    timeout: timedelta,
    formats: tuple[WireFormat, WireFormat],
    result: GradientSum,
) -> Collectives:
    """See Legs. All ranks have to call this together."""
    if not share_links(ranks.nodes):
        return Collectives(ranks, group, formats, result)
    # Every process has to make every group, in the same order.
    groups = [dist.new_group(node, timeout=timeout) for node in nodes_of(ranks.nodes)]
    return ByNode(ranks, group, groups, formats, result)


class ByNode(Collectives):
    communicators = 2

    def __init__(
        self,
        ranks: Ranks,
        group: dist.ProcessGroup,
        groups: list[dist.ProcessGroup],
        formats: tuple[WireFormat, WireFormat],
        result: GradientSum,
    ) -> None:
        """groups: of every node, in their order."""
        self.nodes = nodes_of(ranks.nodes)
        node_of = {rank: node for node in self.nodes for rank in node}
        self.members = node_of[ranks.rank]
        # Of every rank: how many its node has, and which of them it is
        self.counts = [len(node_of[rank]) for rank in range(ranks.world_size)]
        self.places = [node_of[rank].index(rank) for rank in range(ranks.world_size)]
        self.count, self.place = self.counts[ranks.rank], self.places[ranks.rank]
        super().__init__(ranks, group, formats, result)
        own = groups[self.nodes.index(self.members)]
        self.inside = Peers(own, INSIDE, frozenset(range(self.count)))
        self.of_mates = torch.tensor(self.members, device=self.device)

    @property
    def local_ranks(self) -> list[int]:
        return self.members

    # Reduce-scatter

    def gradients(self, kind: str, bucket: Bucket, groups: list[list[Tensor]]) -> Exchange:
        lengths = [cut(length, self.count) for length in bucket.lengths]
        of_owners = [
            torch.split(torch.cat(group), parts) for group, parts in zip(groups, lengths, strict=True)
        ]
        packed = torch.cat([parts[place] for place in range(self.count) for parts in of_owners])
        return Exchange(
            f"{kind} inside the node",
            self.inside,
            self.streams.on_the_wire(packed, INSIDE),
            [sum(parts[place] for parts in lengths) for place in range(self.count)],
            [sum(parts[self.place] for parts in lengths)] * self.count,
            partial(self._reduce, kind, bucket),
        )

    def _reduce(self, kind: str, bucket: Bucket, received: Tensor) -> Exchange:
        """The second stage: the sum of what the local ranks have of its part."""
        parts = received.to(self.device).view(self.count, -1).unbind()
        self.result.look_for_bad(self.of_mates, parts)
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        lengths = [cut(length, self.count)[self.place] for length in bucket.lengths]
        packed = self.gradient_format.pack([[part] for part in torch.split(total, lengths)])
        return Exchange(
            kind,
            self.everybody,
            self.streams.on_the_wire(packed, BETWEEN),
            [self.gradient_format.units(length) for length in lengths],
            [self.gradient_format.units(length) for length in self._sent_to_this(bucket)],
            partial(self._add_up, bucket),
        )

    def _sent_to_this(self, bucket: Bucket) -> list[int]:
        """How many elements of the sums every rank sends to this owner."""
        length = bucket.lengths[self.ranks.rank]
        return [cut(length, count)[place] for count, place in zip(self.counts, self.places, strict=True)]

    def _add_up(self, bucket: Bucket, received: Tensor) -> None:
        parts = self.gradient_format.unpack(received.to(self.device), self._sent_to_this(bucket))
        self.result.add_up(bucket, [torch.cat([parts[rank] for rank in node]) for node in self.nodes])

    # All-gather

    def weights(
        self, kind: str, bucket: Bucket, own: Tensor, take_in: Callable[[Bucket, Tensor], None]
    ) -> Exchange:
        # Nodes with equally many ranks get the same parts, which are packed once.
        counts = sorted(set(self.counts))
        kinds = [(count, place) for count in counts for place in range(count)]
        chosen = [kinds.index(of_rank) for of_rank in zip(self.counts, self.places, strict=True)]
        lengths = [length for count in counts for length in cut(len(own), count)]
        units = [self.weight_format.units(length) for length in lengths]

        def pack() -> Tensor:
            packed = self._packed_now(torch.split(own.repeat(len(counts)), lengths))
            parts = torch.split(packed, units)
            return torch.cat([parts[part] for part in chosen])

        return Exchange(
            kind,
            self.everybody,
            pack,
            [units[part] for part in chosen],
            self._weight_units(bucket)[self.place],
            partial(self._pass_on, kind, bucket, take_in),
        )

    def _weight_units(self, bucket: Bucket) -> list[list[int]]:
        """What every local rank gets of every owner."""
        lengths = [cut(length, self.count) for length in bucket.lengths]
        return [[self.weight_format.units(parts[place]) for parts in lengths] for place in range(self.count)]

    def _pass_on(
        self, kind: str, bucket: Bucket, take_in: Callable[[Bucket, Tensor], None], received: Tensor
    ) -> Exchange:
        """The second stage: to the local ranks, as it came."""
        return Exchange(
            f"{kind} inside the node",
            self.inside,
            self.streams.on_the_wire(received.repeat(self.count), INSIDE),
            [len(received)] * self.count,
            [sum(units) for units in self._weight_units(bucket)],
            partial(take_in, bucket),
        )

    def of_owners(self, bucket: Bucket, received: Tensor) -> list[Tensor]:
        lengths = [cut(length, self.count) for length in bucket.lengths]
        flat = [parts[place] for place in range(self.count) for parts in lengths]
        parts = self.weight_format.unpack(received.to(self.device), flat)
        owners = len(lengths)
        return [torch.cat(parts[owner::owners]) for owner in range(owners)]
