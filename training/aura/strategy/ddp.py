"""The strategy `ddp`: exact synchronous data parallelism. Every rank applies the same gradient in every step.

All have to round alike: on unlike machines parameters part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from aura.cluster.ranks import Ranks
from aura.optim.adamw import Optimizer
from aura.strategy.checksum import checksum
from aura.strategy.data_parallel import DataParallel
from aura.strategy.interface import SUSPECT, Outcome, Told, clip_factor
from aura.strategy.state import copies


class Ddp:
    gathers = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, clip: float) -> None:
        """`clip`: the largest L2 norm of the mean gradient."""
        self.model, self.optimizer, self.ranks, self.clip = model, optimizer, ranks, clip
        self.gradients = DataParallel(model, ranks)

    def start(self) -> None:
        self.gradients.start()

    def begin_step(self) -> None:
        self.gradients.zero_gradients()

    def last_backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(self, told: Told, lr: float) -> Callable[[], Outcome]:
        """From the gradients of the summed losses of all ranks to new parameters. Raises CollectiveFailed."""
        loss_sum, tokens, stops, bad_loss, bad_gradient = self._add_up(told)
        norm = math.nan
        if not bad_loss:  # all ranks know it, so none of them waits for the others' gradients
            self.gradients.reduce_gradients()
            if told.loss_scale != 1:
                self.gradients.scale_gradients(1 / told.loss_scale)
            norm = self.gradients.gradient_norm() / tokens
        left_out = not math.isfinite(norm)
        if not left_out:
            # From the sum to the mean over all tokens, and clipped, in one pass over the gradients
            self.gradients.scale_gradients(clip_factor(norm, self.clip, tokens))
            self.optimizer.step(lr)
        outcome = Outcome(
            loss_sum=loss_sum,
            tokens=tokens,
            gradient_norm=norm,
            stopping=stops > 0,
            suspect=stops >= SUSPECT,
            bad_loss=bad_loss,
            bad_gradient=bad_gradient,
            left_out=left_out,
        )
        return lambda: outcome

    def put_in(self, kept: bool) -> None:
        pass

    def _add_up(self, told: Told) -> tuple[float, int, int, list[int], list[int]]:
        """What all ranks have to know before anything is changed: the sum of their losses [nats], their tokens, how
        many were asked to stop, whose loss and whose gradient is not finite."""
        world_size, rank = self.ranks.world_size, self.ranks.rank
        sums = self.gradients.sums().double()
        loss_sum = torch.as_tensor(told.loss_sum, dtype=torch.float64, device=sums.device)
        mine, gradient = torch.stack([loss_sum, sums]).tolist()
        whose = [[0.0] * world_size for _ in range(2)]
        whose[0][rank] = float(not math.isfinite(mine))
        whose[1][rank] = float(not math.isfinite(gradient))
        loss, tokens, stops, *flags = self.ranks.total(
            [mine, told.tokens, float(told.stop), *whose[0], *whose[1]]
        )
        bad_loss, bad_gradient = (
            [one for one in range(world_size) if part[one]]
            for part in (flags[:world_size], flags[world_size:])
        )
        return loss, int(tokens), int(stops), bad_loss, bad_gradient

    def complete(self) -> None:
        pass  # `apply` has waited for everything

    def expect_delay(self) -> None:
        pass  # the timeout of every operation allows for it

    def agrees_after(self, step: int) -> bool:
        return True

    def compare(self) -> list[int]:
        return self.ranks.odd_ones(checksum(self.model.parameters()))

    def state(self) -> dict[str, Tensor]:
        return self.optimizer.tensors()

    def whole_state(self, wanted: bool, copied: bool) -> Callable[[], dict[str, Tensor]]:
        tensors = copies(self.state()) if wanted and copied else self.state()
        return lambda: tensors

    def load(self, *parts: dict[str, Tensor]) -> None:
        for name, tensor in self.optimizer.tensors().items():
            tensor.copy_(next(part[name] for part in parts if name in part))

    def close(self) -> None:
        pass
