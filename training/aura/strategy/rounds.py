"""The strategy `rounds`: every rank trains by itself for some steps, and then they agree (DiLoCo, arXiv 2311.08105).

    local step   the numbers are exchanged as in every step; each rank clips its own gradient and updates its weights
    end          behind `local_steps` of them, and before anything looks at the parameters: by how much a rank has moved
                 from the weights that all have agreed on goes to their owners, as gradients do. These take the mean,
                 weighted by tokens, make an outer step with it (Nesterov's momentum), and send what comes of it to all
    delay        a part of the next round is trained while that goes on (as in arXiv 2502.12996); then every rank moves
                 by the difference between what has been agreed on and what it had when the round ended

So the wire carries in a round what `sharded` sends in a step: the exchange is one of `sharded`, of the weights that all
have agreed on. It is another algorithm: what it costs in loss grows with the ranks and with the local steps
(docs/engine.md).

Each rank's own optimizer goes on from round to round, and nobody sends its state. A checkpoint, which is taken at the
end of a round that was waited for, holds that of the rank which writes it, under the names that any strategy knows:
where each node has one rank and its own disk, a resume is exact. A rank whose disk is new goes on with the state of the
rank that sends it the checkpoint, and so do ranks that share a disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.strategy.alone import Alone
from aura.strategy.checksum import checksum
from aura.strategy.delayed import STALE, Delayed
from aura.strategy.interface import GlobalStepStats, LocalStepStats, global_stats_of
from aura.strategy.owner_shard import Named
from aura.strategy.sharded import Sharded
from aura.strategy.state import Allocate


class Rounds(Alone):
    def __init__(self, model: nn.Module, ranks: Ranks, config: TrainConfig) -> None:
        """All ranks have to call this together."""
        super().__init__(model, config)
        self.ranks = ranks
        # The weights that all ranks have agreed on. What is never trained shall be the same on all ranks, too.
        own = {name: nn.Parameter(p.detach().clone()) for name, p in self.parameters.items()}
        self.agreed = Named(own, model.buffers())
        # NCCL wants its operations in one order, and those of local steps come beside the exchange.
        delay = config.delay if ranks.device.type == "cpu" else 0.0
        # Nothing is clipped twice, Nesterov needs no matrix whole, and nobody computes on what is being agreed on.
        exchange = replace(config, optimizer="adamw", predicted_weights=False, clip=math.inf, delay=delay)
        kind = Delayed if delay else Sharded
        self.outer = kind(self.agreed, ranks, exchange)
        self.stale = math.ceil(delay * config.local_steps)  # steps of a round that do not know the last one
        self.steps = self.tokens = 0  # of this round; the tokens of this rank
        self.under_way: Callable[[], GlobalStepStats] | None = None  # the exchange of the last one
        self.left: dict[str, Tensor] = {}  # what this rank had when it ended

    def start(self) -> None:
        self._agree_on_own()
        self.outer.start()
        self._take_agreed()

    @torch.no_grad()
    def apply(self, local_stats: LocalStepStats, lr: float) -> Callable[[], GlobalStepStats]:
        global_stats = self._local_step(local_stats, lr)
        self.steps += 1
        at_once = local_stats.looked_at or global_stats.stopping
        if self.under_way and (at_once or self.steps == self.stale):
            global_stats = self._put_in(global_stats)
        self.is_whole = False
        if at_once or self.steps == self.config.local_steps:
            self.is_whole = at_once or not self.stale
            global_stats = self._end_round(global_stats)
        return lambda: global_stats

    def _local_step(self, local_stats: LocalStepStats, lr: float) -> GlobalStepStats:
        loss, norm = self.sums(local_stats)
        norm /= local_stats.loss_scale
        bad = [0.0] * self.ranks.world_size
        bad[self.ranks.rank] = float(not math.isfinite(norm))
        rows = self.ranks.rows([loss, float(local_stats.tokens), float(local_stats.stop), norm**2, *bad])
        # Each rank clips its own; what is said is their root mean square.
        own_norms = [square / tokens**2 for _, tokens, _, square, *_ in rows]
        global_stats = replace(global_stats_of(rows), gradient_norm=math.sqrt(sum(own_norms) / len(rows)))
        if not global_stats.left_out:
            self.update(norm / local_stats.tokens, local_stats, lr)
            self.tokens += local_stats.tokens
        return global_stats

    def _end_round(self, global_stats: GlobalStepStats) -> GlobalStepStats:
        """is_whole: and wait for what it comes to. Of a step, with what became of the round."""
        self.steps = 0
        if not self.tokens:  # fp16: on no rank a step that was not left out
            self._take_agreed()
            return global_stats
        weights = self.agreed.views
        for name, parameter in self.parameters.items():
            parameter.grad = None
            # Times tokens: the owners come to the mean over all of them.
            weights[name].grad = torch.sub(weights[name], parameter).mul_(self.tokens)
        if not self.is_whole:
            self.left = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        with self.outer.last_backward():
            pass
        local_stats, self.tokens = LocalStepStats(0.0, self.tokens), 0
        if self.is_whole:
            # It may take far longer than the steps by which hanging ranks are found.
            self.ranks.activity.expect_delay()
        self.under_way = self.outer.apply(local_stats, self.config.outer_lr)
        return self._put_in(global_stats) if self.is_whole else global_stats

    def _put_in(self, global_stats: GlobalStepStats) -> GlobalStepStats:
        """What the last round has come to. Of a step, with what became of that round."""
        assert self.under_way
        self.ranks.activity.expect_delay()
        of_round, self.under_way = self.under_way(), None
        self.outer.apply_update(kept=False)
        self.outer.complete()
        if self.left:
            for name, parameter in self.parameters.items():
                parameter.sub_(self.left[name].sub_(self.agreed.views[name]))
        else:
            self._take_agreed()
        self.left = {}
        if not of_round.left_out:
            return global_stats
        return replace(
            global_stats, left_out=True, bad_gradient=global_stats.bad_gradient or of_round.bad_gradient
        )

    def expect_delay(self) -> None:
        self.outer.expect_delay()

    def compare(self) -> list[int]:
        return self.ranks.odd_ones(checksum(self.parameters.values()))

    def full_state_dict(self, wanted: Allocate | None) -> Callable[[], dict[str, Tensor]]:
        collect, own = self.outer.full_state_dict(wanted), super().full_state_dict(wanted)
        return lambda: collect() | own()

    @torch.no_grad()
    def load(self, whole: dict[str, Tensor]) -> None:
        self._agree_on_own()
        # Weights of late micro-batches are those of another strategy.
        self.outer.load({name: tensor for name, tensor in whole.items() if not name.endswith(f".{STALE}")})
        super().load(whole)

    def close(self) -> None:
        self.outer.close()

    @torch.no_grad()
    def _agree_on_own(self) -> None:
        for name, parameter in self.parameters.items():
            self.agreed.views[name].copy_(parameter)

    @torch.no_grad()
    def _take_agreed(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.agreed.views[name])
