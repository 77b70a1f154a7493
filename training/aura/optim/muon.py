"""Muon (Jordan et al., 2024) for the matrices of the blocks, AdamW for everything else.

The update of a matrix is its momentum with all singular values brought near 1. It is scaled as in Moonlight (Liu et
al., 2025) to the size of AdamW's updates, so that learning rate and weight decay mean the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from aura.cluster.place import compiles
from aura.config import TrainConfig
from aura.families.known import FAMILIES
from aura.optim.adamw import AdamW, Optimizer
from aura.optim.groups import Group, group_of

BLOCKS = tuple(begin for family in FAMILIES.values() for begin in family.blocks)
PARTS = {end: parts for family in FAMILIES.values() for end, parts in family.parts.items()}
MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at 0, and then between 0.7 and 1.2
SIZE = 0.2  # root mean square of AdamW's updates, as Moonlight found it


def optimizer_of(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The one that `config` asks for."""
    adamw, groups = (config.beta1, config.beta2, config.weight_decay), partial(group_of, config=config)
    if config.optimizer == "muon":
        return Muon(model, *adamw, group_of=groups)
    device = next((p.device for _, p in model.named_parameters()), torch.device("cpu"))
    formats, compiled = (config.moment_format, config.seed), compiles(config, device)
    return AdamW(model, *adamw, *formats, compiled=compiled, group_of=groups)


def matrices_in(name: str, parameter: Tensor) -> int:
    """Of how many matrices of a block a parameter consists, one below another; 0 where it is none."""
    if not name.startswith(BLOCKS) or parameter.dim() != 2:
        return 0
    # A segment of several, with [start:stop] behind its name, is one of them.
    return next((parts for end, parts in PARTS.items() if name.endswith(end)), 1)


class Muon:
    def __init__(
        self,
        model: nn.Module,
        beta1: float,
        beta2: float,
        weight_decay: float,
        group_of: Callable[[str, Tensor], Group] | None = None,
    ) -> None:
        """`beta1`, `beta2`: of AdamW, for embeddings, biases and LayerNorms."""
        self.matrices = {name: p for name, p in model.named_parameters() if matrices_in(name, p)}
        self.momentum = {name: torch.zeros_like(p.data) for name, p in self.matrices.items()}
        self.weight_decay = weight_decay
        self.others = AdamW(model, beta1, beta2, weight_decay, without=self.matrices, group_of=group_of)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.others.step(lr)
        for name, parameter in self.matrices.items():
            assert parameter.grad is not None
            momentum = self.momentum[name].lerp_(parameter.grad, 1 - MOMENTUM)
            parts = matrices_in(name, parameter)
            shape = (parts, parameter.shape[0] // parts, parameter.shape[1])
            update = orthogonalised(parameter.grad.lerp(momentum, MOMENTUM).view(shape))  # Nesterov's
            parameter.mul_(1 - lr * self.weight_decay)
            parameter.view(shape).add_(update, alpha=-lr * SIZE * max(shape[1:]) ** 0.5)
            del update  # before the next one needs the room

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name: <parameter>.momentum, and AdamW's for the other parameters."""
        return {f"{name}.momentum": tensor for name, tensor in self.momentum.items()} | self.others.tensors()


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each of the matrices (n, rows, columns) with its singular values between 0.7 and 1.2; overwrites its argument.

    Five Newton-Schulz iterations; a singular value below about 1/500 of the Frobenius norm stays smaller. A matrix of
    zeros stays so.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    matrices /= torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-30)
    x = matrices if wide else matrices.mT
    if x.is_cuda:
        x = x.bfloat16()
    del matrices  # as soon as possible, x takes its place
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x if wide else x.mT
