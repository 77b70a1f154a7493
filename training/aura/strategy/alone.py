"""The strategy of a process that is alone: no pieces, no copies, no communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aura.config import TrainConfig
from aura.optim.adamw import Optimizer
from aura.optim.muon import optimizer_of
from aura.strategy.interface import SUSPECT, Outcome, Strategy, Told, clip_factor
from aura.strategy.pieces import Segment
from aura.strategy.state import copies, take


def fill_missing(parameters: Iterable[nn.Parameter]) -> None:
    """A parameter without a gradient has one of zeros, as with several owners."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def norm_of_sum(gradients: list[Tensor]) -> Tensor:
    """L2 of all together, () in fp64."""
    norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
    return torch.linalg.vector_norm(norms, dtype=torch.float64)


def scale(gradients: list[Tensor], factor: float) -> None:
    """All of them, in place."""
    if gradients[0].is_cuda:
        torch._foreach_mul_(gradients, factor)
        return
    # A CPU has no launches to save, and would round the factor to the format of the gradients.
    for gradient in gradients:
        gradient.mul_(factor)


def take_all(whole: Mapping[str, Tensor], optimizer: Optimizer, sizes: Mapping[str, int]) -> None:
    """Overwrite the state of an optimizer of whole parameters. sizes: their elements. Raises DataError."""
    for text, tensor in optimizer.tensors().items():
        name, _, kind = text.rpartition(".")
        take(whole, Segment(name, 0, sizes[name]), kind, tensor)


class Alone(Strategy):
    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.parameters = list(model.parameters())
        self.clip = config.clip
        self.optimizer = optimizer_of(model, config)

    def begin_step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        yield
        fill_missing(self.parameters)

    @torch.no_grad()
    def apply(self, told: Told, lr: float) -> Callable[[], Outcome]:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        sum_norm = norm_of_sum(gradients)
        loss_sum = torch.as_tensor(told.loss_sum, dtype=torch.float64, device=sum_norm.device)
        loss, norm = torch.stack(
            [loss_sum, sum_norm]
        ).tolist()  # the one time that the host waits for the device
        norm /= told.loss_scale * told.tokens
        good_loss, good_norm = math.isfinite(loss), math.isfinite(norm)
        if good_loss and good_norm:
            factor = clip_factor(norm, self.clip, told.tokens) / told.loss_scale
            scale(gradients, factor)
            self.optimizer.step(lr)
        outcome = Outcome(
            loss_sum=loss,
            tokens=told.tokens,
            gradient_norm=norm,
            stopping=told.stop > 0,
            suspect=told.stop >= SUSPECT,
            bad_loss=[] if good_loss else [0],
            bad_gradient=[] if good_norm else [0],
            left_out=not (good_loss and good_norm),
        )
        return lambda: outcome

    def state(self) -> dict[str, Tensor]:
        return self.optimizer.tensors()

    def whole_state(self, wanted: bool, copied: bool) -> Callable[[], dict[str, Tensor]]:
        tensors = copies(self.state()) if wanted and copied else self.state()
        return lambda: tensors

    def load(self, whole: dict[str, Tensor]) -> None:
        take_all(whole, self.optimizer, self.sizes)
