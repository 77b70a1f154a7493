"""Gradients in bf16, added up over the micro-batches of a step.

Rounded to nearest, a gradient of less than 1/512 of the sum before it would be lost, and the later of many
micro-batches would count less than the first. In fp32 nothing would be lost, but that takes 2 bytes per parameter
more, just what parameter_format=bf16 is chosen to save: gpt2-medium-4gb would need 3.9 GB of a card's 4 where it needs
3.2. So every sum is rounded up or down at random, in such a way that its mean is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from aura.optim.adamw import PIECE, mix_seed


class GradientSum:
    """Hooks of the parameters. A rank draws for itself: nobody else adds up what it adds up."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed, self.position = seed, 0
        self.added: dict[str, int] = {}  # how often, in this step
        self.generator = torch.Generator(next(model.parameters()).device)
        for name, parameter in model.named_parameters():
            parameter.register_hook(self._hook(name, parameter))  # type: ignore[no-untyped-call]

    def begin_step(self, position: int) -> None:
        """What is drawn follows from the position in the data alone, so that a run that was interrupted draws the
        same."""
        self.position = position
        self.added.clear()

    def _hook(self, name: str, parameter: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
        def add(gradient: Tensor) -> Tensor | None:
            before, count = parameter.grad, self.added.get(name, 0)
            self.added[name] = count + 1
            if before is None or not count:
                return None
            self.generator.manual_seed(mix_seed(self.seed + self.position, name, count))
            total = sum_at_random(before, gradient, self.generator)
            before.zero_()  # autograd adds to it what this returns
            return total

        return add


def sum_at_random(one: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    """one + other in bf16, up or down with the probability that keeps the mean; a piece at a time."""
    total = torch.empty_like(one)
    flat, parts = total.view(-1), (one.reshape(-1), other.reshape(-1))
    for first in range(0, len(flat), PIECE):
        piece = slice(first, first + PIECE)
        exact = parts[0][piece].float().add_(parts[1][piece])
        bits = torch.randint(
            1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator
        )
        rounded = bits.add_(exact.view(torch.int32)).bitwise_and_(-65536).view(torch.float32)
        flat[piece].copy_(rounded.where(exact.isfinite(), exact))
    return total
