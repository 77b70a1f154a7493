"""Gradient descent with Nesterov's momentum, as torch.optim.SGD(momentum=m, nesterov=True) has it: the outer optimizer
of the strategy `rounds`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOMENTUM = "outer_momentum"


class Nesterov:
    def __init__(self, model: nn.Module, momentum: float) -> None:
        self.parameters = dict(model.named_parameters())
        self.momentum = momentum
        self.buffers = {
            name: torch.zeros_like(p.data, dtype=torch.float32) for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """The gradients are overwritten."""
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            buffer = self.buffers[name].mul_(self.momentum).add_(parameter.grad)
            parameter.add_(parameter.grad.add_(buffer, alpha=self.momentum), alpha=-lr)

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name: <parameter>.outer_momentum."""
        return {f"{name}.{MOMENTUM}": buffer for name, buffer in self.buffers.items()}
