"""How ranks agree.

`Ranks` is what the loop knows about the others: sums, comparisons, broadcasts of small things. A strategy decides how
the parameters agree. `DataParallel` (strategy `ddp`) adds the gradients of all ranks in every step.

It does not use torch's DistributedDataParallel: that rebuilds its buckets after the first iteration, so the first step
after a resume adds in another order than the same step of a run without interruption, and the two differ in the last
bit. Here the layout is fixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 1024 * 1024  # as torch's DDP: large enough for the bandwidth, small enough to overlap


class CollectiveFailed(Exception):
    """An operation that needs all ranks has failed: one of them, or the way to it, is gone."""


@contextmanager
def collective() -> Iterator[None]:
    """torch.distributed reports a vanished peer as RuntimeError or a subclass, like its own bugs."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveFailed(str(error)) from error


class Ranks:
    """This rank among the others. With one rank every method answers at once, without torch.distributed."""

    def __init__(self, rank: int, nodes: list[str], device: torch.device) -> None:
        """`nodes`: the name of every rank's node."""
        self.rank, self.nodes, self.world_size = rank, nodes, len(nodes)
        # NCCL moves only GPU memory; gloo is quicker with the CPU's.
        uses_nccl = self.world_size > 1 and dist.get_backend() == "nccl"
        self.device = device if uses_nccl else torch.device("cpu")

    def name(self, ranks: list[int]) -> str:
        """'rank 1 on node1, rank 3 on node3'"""
        return ", ".join(f"rank {rank} on {self.nodes[rank]}" for rank in ranks)

    def total(self, values: list[float]) -> list[float]:
        """The element-wise sum over all ranks, in fp64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with collective():
            dist.all_reduce(tensor)
            return tensor.tolist()

    def gather(self, values: list[int]) -> list[list[int]]:
        """The values of every rank, by rank; 64-bit integers."""
        if self.world_size == 1:
            return [values]
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with collective():
            dist.all_gather(rows, tensor)
            return [row.tolist() for row in rows]

    def odd_ones(self, value: int) -> list[int]:
        """The ranks whose value differs from that of the majority (of rank 0, when there is none)."""
        values = [row[0] for row in self.gather([value])]
        usual = max(values, key=values.count)
        return [rank for rank, other in enumerate(values) if other != usual]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` with that of rank `source`."""
        if self.world_size > 1:
            with collective():
                dist.broadcast(tensor, source)
        return tensor

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        length = self.broadcast(torch.tensor([len(data)], device=self.device), source)
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return bytes(self.broadcast(buffer, source).cpu().numpy())


class Strategy(Protocol):
    """What the loop asks of a strategy. It never assumes that parameters agree, it asks `agrees_after`."""

    def start(self) -> None:
        """Make the parameters of all ranks equal."""

    def zero_gradients(self) -> None: ...

    def reduce_gradients(self) -> None:
        """Turn the gradients of this rank's summed loss into those of all ranks' summed loss."""

    def gradient_is_finite(self) -> bool:
        """Of this rank alone, before `reduce_gradients`."""

    def gradient_norm(self) -> float: ...

    def scale_gradients(self, factor: float) -> None: ...

    def agrees_after(self, step: int) -> bool:
        """Must the parameters of all ranks be bit-equal after this step?"""


class DataParallel:
    """Exact synchronous data parallelism: every rank applies the same gradient in every step.

    All gradients are views into a few flat buffers, in the order of the parameters, so the wire sees few large
    operations, and the order of summation never changes. A rank that is alone needs no buffers (`in_buckets`): its
    gradients stay where the backward pass makes them, which saves adding them to zeros.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, in_buckets: bool = True) -> None:
        self.ranks = ranks
        self.parameters = list(model.parameters())
        self.buckets: list[Tensor] = []
        for group in _buckets(self.parameters) if in_buckets else []:
            sizes = [parameter.numel() for parameter in group]
            flat = torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device)
            self.buckets.append(flat)
            for parameter, part in zip(group, torch.split(flat, sizes), strict=True):
                parameter.grad = part.view_as(parameter)
        self._places = [p.grad.data_ptr() for p in self.parameters if p.grad is not None]

    def start(self) -> None:
        """Nodes with different processors may draw different last bits from the same seed: rank 0's count."""
        for parameter in self.parameters:
            self.ranks.broadcast(parameter.data, source=0)

    def zero_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.zero_()
        if not self.buckets:
            for parameter in self.parameters:
                parameter.grad = None

    def reduce_gradients(self) -> None:
        if self.buckets:
            places = [p.grad.data_ptr() for p in self.parameters if p.grad is not None]
            assert places == self._places, "a gradient has left its bucket"
        if self.ranks.world_size > 1:
            with collective():
                for work in [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]:
                    work.wait()

    def gradient_is_finite(self) -> bool:
        """A sum is finite when its terms are, unless they are about as large as fp32 can hold.

        A rank that is alone is not asked: its norm says it.
        """
        if not self.buckets:
            return True
        return bool(
            torch.isfinite(torch.stack([bucket.sum(dtype=torch.float32) for bucket in self.buckets]).sum())
        )

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient, as rank 0 computes it.

        Different GPUs add in different order, and clipping by two different norms would part the ranks for ever.
        """
        norms = torch.stack(
            [torch.linalg.vector_norm(part, dtype=torch.float32) for part in self._gradients()]
        )
        norm = torch.linalg.vector_norm(norms).to(self.ranks.device)
        with collective():  # NCCL reports a failed operation when its result is read
            return self.ranks.broadcast(norm, source=0).item()

    def scale_gradients(self, factor: float) -> None:
        for part in self._gradients():
            part.mul_(factor)

    def _gradients(self) -> list[Tensor]:
        return self.buckets or [p.grad for p in self.parameters if p.grad is not None]

    def agrees_after(self, step: int) -> bool:
        return True


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in order, in groups of about BUCKET_BYTES; the grouping depends on nothing else."""
    groups: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if groups[-1] and size + parameter.nbytes > BUCKET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups


def checksum(tensors: Iterable[Tensor]) -> int:
    """64 bits from the sums of the raw words (elements) of every tensor.

    Any single changed bit changes it; changes within one tensor that cancel in its sum are not seen.
    """
    words = {4: torch.int32, 2: torch.int16}
    sums = torch.stack(
        [t.detach().flatten().view(words[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    )
    return int.from_bytes(
        hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=8).digest(), "big", signed=True
    )
