"""The gradients of all ranks, added up in every step.

It does not use torch's DistributedDataParallel: that rebuilds its buckets after the first iteration, so the first step
after a resume adds in another order than the same step of a run without interruption, and the two differ in the last
bit. Here the layout is fixed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aura.cluster.ranks import Ranks
from aura.strategy.checksum import make_equal

BUCKET_BYTES = 25 * 1024 * 1024  # as torch's DDP: large enough for the bandwidth, small enough to overlap


class DataParallel:
    """All gradients are views into a few flat buffers, in the order of the parameters, so the wire sees few large
    operations, and the order of summation never changes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self.parameters, self.buffers = list(model.parameters()), list(model.buffers())
        self.buckets: list[Tensor] = []
        for group in _buckets(self.parameters):
            sizes = [parameter.numel() for parameter in group]
            flat = torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device)
            self.buckets.append(flat)
            for parameter, part in zip(group, torch.split(flat, sizes), strict=True):
                parameter.grad = part.view_as(parameter)
        self._places = [p.grad.data_ptr() for p in self.parameters if p.grad is not None]

    def start(self) -> None:
        make_equal(self.ranks, [*(parameter.data for parameter in self.parameters), *self.buffers])

    def zero_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.zero_()

    def reduce_gradients(self) -> None:
        places = [p.grad.data_ptr() for p in self.parameters if p.grad is not None]
        assert places == self._places, "a gradient has left its bucket"
        if self.ranks.world_size > 1:
            with self.ranks.together():
                for work in [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]:
                    work.wait()

    def sums(self) -> Tensor:
        """Of all elements, (): finite when they are, unless they are about as large as fp32 can hold."""
        return torch.stack([bucket.sum(dtype=torch.float32) for bucket in self.buckets]).sum()

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient, as rank 0 computes it.

        Different GPUs add in different order, and clipping by two different norms would part the ranks for ever.
        """
        norms = torch.stack(
            [torch.linalg.vector_norm(bucket, dtype=torch.float32) for bucket in self.buckets]
        )
        norm = torch.linalg.vector_norm(norms).to(self.ranks.device)
        with self.ranks.together():  # NCCL reports a failed operation when its result is read
            return self.ranks.broadcast(norm, source=0).item()

    def scale_gradients(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.mul_(factor)


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
