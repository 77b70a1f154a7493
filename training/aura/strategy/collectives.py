"""What reduce-scatter and all-gather of `sharded` send to whom, and what is made of what comes. Here straight from
every rank to every rank; where ranks share the link of a node, see by_node.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from aura.cluster.ranks import Ranks
from aura.strategy.buckets import Bucket
from aura.strategy.formats import WireFormat
from aura.strategy.streams import Streams
from aura.strategy.wire import Exchange, Peers

BETWEEN = 0  # the communicator of what goes from rank to rank over the network


class GradientSum:
    """Of this rank's owned gradient: the sum over all ranks, the sum of its squares, and which ranks' parts are not
    finite, as far as this rank has seen them."""

    def __init__(self, gradient: Tensor, world_size: int) -> None:
        """gradient: fp32, flat, in the order of the owner's stream; it is overwritten."""
        self.gradient = gradient
        self.squares = torch.zeros((), dtype=torch.float64, device=gradient.device)
        self.sums = torch.zeros(world_size, device=gradient.device)  # of every rank's parts

    def begin(self) -> None:
        self.squares.zero_()
        self.sums.zero_()

    def bad(self) -> Tensor:
        """A sum is finite when its terms are, unless they are about as large as fp32 can hold."""
        return ~self.sums.isfinite()

    def add_up(self, bucket: Bucket, parts: Sequence[Tensor]) -> None:
        """In the order of the parts, never in that of arrival; in fp32."""
        total = self.gradient[bucket.start : bucket.start + len(parts[0])]
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        wide = total.double()
        self.squares += wide.dot(wide)

    def look_for_bad(self, ranks: slice | Tensor, parts: Sequence[Tensor]) -> None:
        self.sums[ranks] += torch.stack([part.sum(dtype=torch.float32) for part in parts])


class Collectives:
    communicators = 1  # of the wire

    def __init__(
        self,
        ranks: Ranks,
        group: dist.ProcessGroup,
        formats: tuple[WireFormat, WireFormat],
        result: GradientSum,
    ) -> None:
        """group: of all ranks. formats: of gradients and of weights on the wire. result: of the reduce-scatter."""
        self.ranks, self.result = ranks, result
        self.gradient_format, self.weight_format = formats
        self.device = result.gradient.device
        self.everybody = Peers(group, BETWEEN, frozenset(self.local_ranks))
        self.streams = Streams(self.device, ranks.device, self.communicators)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks that this one reaches without its node's link."""
        return [self.ranks.rank]

    def gradients(self, kind: str, bucket: Bucket, groups: list[list[Tensor]]) -> Exchange:
        """Reduce-scatter of a round. groups: this rank's gradient of the elements of every owner."""
        units = [self.gradient_format.units(length) for length in bucket.lengths]
        return Exchange(
            kind,
            self.everybody,
            self.streams.on_the_wire(self.gradient_format.pack(groups), BETWEEN),
            units,
            [units[self.ranks.rank]] * self.ranks.world_size,
            partial(self._add_up, bucket),
        )

    def weights(
        self, kind: str, bucket: Bucket, own: Tensor, take_in: Callable[[Bucket, Tensor], None]
    ) -> Exchange:
        """All-gather of a round. own: what this rank's elements become, or what is added to them. take_in: gets what
        has come, for `of_owners`, in a thread of the wire."""
        units = [self.weight_format.units(length) for length in bucket.lengths]
        return Exchange(
            kind,
            self.everybody,
            lambda: self._packed_now([own]).repeat(self.ranks.world_size),
            [units[self.ranks.rank]] * self.ranks.world_size,
            units,
            partial(take_in, bucket),
        )

    def _packed_now(self, parts: Sequence[Tensor]) -> Tensor:
        """In the thread of the wire, so that on a slow link no more is packed than what is under way."""
        for part in parts:
            self.streams.used_by_current(part)
        return self.streams.on_the_wire(self.weight_format.pack([[part] for part in parts]), BETWEEN)()

    def of_owners(self, bucket: Bucket, received: Tensor) -> list[Tensor]:
        """What the all-gather has brought of every owner."""
        return self.weight_format.unpack(received.to(self.device), bucket.lengths)

    def _add_up(self, bucket: Bucket, received: Tensor) -> None:
        length = bucket.lengths[self.ranks.rank]
        if not length:
            return
        parts = self.gradient_format.unpack(received.to(self.device), [length] * self.ranks.world_size)
        self.result.add_up(bucket, parts)
        self.result.look_for_bad(slice(None), parts)
