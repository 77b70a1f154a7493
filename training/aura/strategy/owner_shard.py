"""What one rank owns of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aura.strategy.buckets import Shard


class Named(nn.Module):
    """Tensors as if they were the parameters of a model: an optimizer and a strategy see no difference. Their names may
    have dots, which torch gives to none."""

    def __init__(self, views: dict[str, nn.Parameter], buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.views, self.fixed = views, list(buffers)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.views.items()

    def buffers(self, *_: Any, **__: Any) -> Iterator[Tensor]:
        yield from self.fixed


class OwnerShard(Named):
    """The owned elements: with `master` copies in fp32, otherwise the elements themselves.

    Whole matrices have two dimensions; so do parts of matrices and embeddings (one row), which say to the optimizer
    that they decay. The gradients are parts of one flat fp32 tensor, in the order of the owner's stream.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        shards: list[Shard],
        matrices: set[str],
        master: bool = False,
    ) -> None:
        super().__init__({})
        self.master = master
        self.everybodys: list[Tensor] = []  # the elements as all ranks have them
        self.shards: dict[str, Shard] = {}
        first = next(iter(parameters.values()))
        self.format = first.dtype
        self.gradient = torch.zeros(sum(map(len, shards)), device=first.device)
        place = 0
        for shard in shards:
            parameter = parameters[shard.name]
            columns = parameter.shape[-1] if shard.name in matrices else len(shard)
            shape = (-1, columns) if parameter.dim() > 1 else (-1,)
            part = parameter.data.view(-1)[shard.start : shard.stop]
            self.everybodys.append(part)
            view = nn.Parameter((part.float().clone() if master else part).view(shape), requires_grad=False)
            view.grad_dtype = torch.float32  # also of bf16 parameters
            view.grad = self.gradient[place : place + len(shard)].view(shape)
            name = f"{shard.name}[{shard.start}:{shard.stop}]"
            self.shards[name], self.views[name] = shard, view
            place += len(shard)

    def values(self) -> Tensor:
        """A copy of the elements, flat, in the order of the stream."""
        return self._one_after_another([view.view(-1) for view in self.views.values()])

    def weights(self) -> Tensor:
        """The same of those that all ranks have."""
        return self._one_after_another(self.everybodys)

    def take_back(self, weights: Tensor) -> None:
        """An update without master has changed everybody's weights on this rank alone: as they were before it."""
        if not self.master:
            self._overwrite(weights)

    def begin_anew(self) -> None:
        """From the weights that all ranks have."""
        if self.master:
            self._overwrite(self.weights())

    def _one_after_another(self, parts: list[Tensor]) -> Tensor:
        nothing = self.gradient.new_empty(0, dtype=self.format)  # torch.cat wants something
        return torch.cat([nothing, *parts])

    def _overwrite(self, values: Tensor) -> None:
        parts = torch.split(values, [len(shard) for shard in self.shards.values()])
        for view, part in zip(self.views.values(), parts, strict=True):
            view.copy_(part.view_as(view))
