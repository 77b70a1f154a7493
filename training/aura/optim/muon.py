"""Muon (Jordan et al., 2024) for the matrices of the blocks, AdamW for everything else.

The update of a matrix is its momentum with all singular values brought near 1. It is scaled as in Moonlight (Liu et
al., 2025) to the size of AdamW's updates, so that learning rate and weight decay mean the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from aura.config import TrainConfig
from aura.families.known import FAMILIES
from aura.optim.adamw import AdamW, Optimizer
from aura.plan.memory import STACK

BLOCKS = tuple(begin for family in FAMILIES.values() for begin in family.blocks)
PARTS = {end: parts for family in FAMILIES.values() for end, parts in family.parts.items()}
MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at 0, and then between 0.7 and 1.2
SIZE = 0.2  # root mean square of AdamW's updates, as Moonlight found it


def optimizer_of(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The one that `config` asks for."""
    return Muon(model, config) if config.optimizer == "muon" else AdamW(model, config)


def matrices_in(name: str, parameter: Tensor) -> int:
    """Of how many matrices of a block a parameter consists, one below another; 0 where it is none."""
    if not name.startswith(BLOCKS) or parameter.dim() != 2:
        return 0
    # A segment of several, with [start:stop] behind its name, is one of them.
    return next((parts for end, parts in PARTS.items() if name.endswith(end)), 1)


def shape_in(name: str, parameter: Tensor) -> tuple[int, int, int]:
    """Of a parameter's matrices: their number, rows and columns."""
    parts = matrices_in(name, parameter)
    return parts, parameter.shape[0] // parts, parameter.shape[1]


def stacks(shapes: Mapping[str, tuple[int, int, int]], most: int) -> Iterator[list[str]]:
    """The names of what is updated together: matrices of one shape, up to so many elements; a parameter with more of
    them is alone. shapes: see `shape_in`."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault(shape[1:], []).append(name)
    for names in alike.values():
        stack: list[str] = []
        size = 0
        for name in names:
            size += math.prod(shapes[name])
            if stack and size > most:
                yield stack
                stack, size = [], math.prod(shapes[name])
            stack.append(name)
        yield stack


class Muon:
    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.matrices = {name: p for name, p in model.named_parameters() if matrices_in(name, p)}
        self.momentum = {name: torch.zeros_like(p.data) for name, p in self.matrices.items()}
        # One by one, 25 launches each, a card would wait for the host (measured: 29 ms for gpt2's, 3 of arithmetic).
        on_gpu = any(p.is_cuda for p in self.matrices.values())
        self.shapes = {name: shape_in(name, p) for name, p in self.matrices.items()}
        self.stacks = list(stacks(self.shapes, STACK if on_gpu else 1))
        self.weight_decay = config.weight_decay
        self.others = AdamW(model, config, without=self.matrices)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.others.step(lr)
        gradients = {name: p.grad for name, p in self.matrices.items() if p.grad is not None}
        for names in self.stacks:
            parameters, momenta, new = (
                [tensors[name].view(self.shapes[name]) for name in names]
                for tensors in (self.matrices, self.momentum, gradients)
            )
            update = orthogonalised(looked_ahead(momenta, new))
            # In the parameters' format and order, or each would be a launch of its own.
            update = update.to(torch.float32, memory_format=torch.contiguous_format)
            updates = torch.split(update, list(map(len, parameters)))
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
            torch._foreach_add_(parameters, updates, alpha=-lr * SIZE * max(update.shape[1:]) ** 0.5)
            del update, updates  # before the next ones need the room

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name: <parameter>.momentum, and AdamW's for the other parameters."""
        return {f"{name}.momentum": tensor for name, tensor in self.momentum.items()} | self.others.tensors()


def looked_ahead(momenta: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Nesterov's gradients, one below another (n, rows, columns), behind a step of the momenta."""
    torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
    stack = torch.cat(gradients)
    torch._foreach_lerp_(torch.split(stack, list(map(len, gradients))), momenta, MOMENTUM)
    return stack


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
        del polynomial
    return x if wide else x.mT
