"""What one rank owns of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aura.strategy.pieces import Segment


class Shard(nn.Module):
    """The owned elements, as if they were the parameters of a model: an optimizer sees no difference.

    Whole matrices have two dimensions; so do parts of matrices and embeddings (one row), which say to the optimizer
    that they decay. The gradients are parts of one flat fp32 tensor, in the order of the owner's stream.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], segments: list[Segment], matrices: set[str]
    ) -> None:
        super().__init__()
        self.segments: dict[str, Segment] = {}
        self.views: dict[str, nn.Parameter] = {}
        first = next(iter(parameters.values()))
        self.format = first.dtype
        self.gradient = torch.zeros(sum(map(len, segments)), device=first.device)
        place = 0
        for segment in segments:
            parameter = parameters[segment.name]
            columns = parameter.shape[-1] if segment.name in matrices else len(segment)
            shape = (-1, columns) if parameter.dim() > 1 else (-1,)
            part = parameter.data.view(-1)[segment.start : segment.stop].view(shape)
            view = nn.Parameter(part, requires_grad=False)
            view.grad_dtype = torch.float32  # also of bf16 parameters
            view.grad = self.gradient[place : place + len(segment)].view(shape)
            name = f"{segment.name}[{segment.start}:{segment.stop}]"
            self.segments[name], self.views[name] = segment, view
            place += len(segment)

    def values(self) -> Tensor:
        """A copy of the elements, flat, in the order of the stream."""
        nothing = self.gradient.new_empty(0, dtype=self.format)  # torch.cat wants something
        return torch.cat([nothing, *(view.view(-1) for view in self.views.values())])

    def overwrite(self, values: Tensor) -> None:
        parts = torch.split(values, [len(segment) for segment in self.segments.values()])
        for view, part in zip(self.views.values(), parts, strict=True):
            view.copy_(part.view_as(view))

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.views.items()
