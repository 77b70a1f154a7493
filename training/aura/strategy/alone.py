"""The strategy of a process that is alone: no pieces, no copies, no communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from aura.config import TrainConfig
from aura.optim.muon import optimizer_of
from aura.strategy.buckets import Shard
from aura.strategy.interface import GlobalStepStats, LocalStepStats, Strategy, clip_factor, global_stats_of
from aura.strategy.state import Allocate, copies, take


class Alone(Strategy):
    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.config = config
        self.parameters = dict(model.named_parameters())
        self.optimizer = optimizer_of(model, config)

    def begin_step(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """A parameter without a gradient has one of zeros, as with several owners."""
        yield
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def apply(self, local_stats: LocalStepStats, lr: float) -> Callable[[], GlobalStepStats]:
        loss, norm = self.sums(local_stats)
        norm /= local_stats.loss_scale * local_stats.tokens
        row = [
            loss,
            float(local_stats.tokens),
            float(local_stats.stop),
            norm**2,
            float(not math.isfinite(norm)),
        ]
        global_stats = replace(global_stats_of([row]), gradient_norm=norm)
        if not global_stats.left_out:
            self.update(norm, local_stats, lr)
        return lambda: global_stats

    def sums(self, local_stats: LocalStepStats) -> tuple[float, float]:
        """Of this rank: the loss, and the L2 norm of the gradients of all tokens together, in fp64."""
        norms = torch.stack(torch._foreach_norm(self._gradients(), dtype=torch.float32))
        norm = torch.linalg.vector_norm(norms, dtype=torch.float64)
        loss = torch.as_tensor(local_stats.loss_sum, dtype=torch.float64, device=norm.device)
        # The one time in a step that the host waits for the device
        of_loss, of_gradients = torch.stack([loss, norm]).tolist()
        return of_loss, of_gradients

    def update(self, norm: float, local_stats: LocalStepStats, lr: float) -> None:
        """norm: of the mean over this rank's tokens."""
        gradients = self._gradients()
        factor = clip_factor(norm, self.config.clip, local_stats.tokens) / local_stats.loss_scale
        if gradients[0].is_cuda:
            torch._foreach_mul_(gradients, factor)
        else:  # a CPU has no launches to save, and would round the factor to the format of the gradients
            for gradient in gradients:
                gradient.mul_(factor)
        self.optimizer.step(lr)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def full_state_dict(self, wanted: Allocate | None) -> Callable[[], dict[str, Tensor]]:
        tensors = copies(self.optimizer.tensors(), wanted) if wanted else {}
        return lambda: tensors

    def load(self, whole: dict[str, Tensor]) -> None:
        for text, tensor in self.optimizer.tensors().items():
            name, _, kind = text.rpartition(".")
            take(whole, Shard(name, 0, self.parameters[name].numel()), kind, tensor)
