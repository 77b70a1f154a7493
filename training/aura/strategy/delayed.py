"""The strategy `sharded` with a delay: the exchange of a step goes on while the next one computes.

    boundary      gradients leave for their owners; everybody's weights go on by as much as they did last time
                  (predicted weights), and the first micro-batches of the next step compute on these
    meanwhile     reduce-scatter and all-gather, the numbers and the optimizer, in threads of their own
    apply_update  after a number of micro-batches that the plan has fixed, whoever has to wait for it: what the
                  all-gather has brought goes into the weights of all ranks, which are those after the step from here on

So which gradient was computed on which weights follows from the plan, not from the speed of the wire, and the same plan
gives the same bits. What the all-gather carries is the difference to the predicted weights: their owner has predicted
the same, so that no error of the prediction is there to stay.

A checkpoint is taken behind `apply_update`. What goes on from it computes the step that was under way again: it needs
the weights that its first micro-batches have seen (`.late`) and by how much the last step has changed them (`.change`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.strategy.buckets import Bucket
from aura.strategy.interface import GlobalStepStats, LocalStepStats
from aura.strategy.sharded import Sharded
from aura.strategy.state import Allocate, copies

STALE, WEIGHT_DELTA = "late", "change"  # as checkpoints have them


class Delayed(Sharded):
    awaits_by_layer = False

    def __init__(self, model: nn.Module, ranks: Ranks, config: TrainConfig) -> None:
        """All ranks have to call this together."""
        super().__init__(model, ranks, config)
        self.weight_delta: dict[str, Tensor] = {}
        if config.predicted_weights:
            # Half of the digits are enough: what is predicted wrong, the all-gather puts right.
            self.weight_delta = {
                name: torch.zeros_like(part, dtype=torch.bfloat16) for name, part in self.flat.items()
            }
        self.came: list[tuple[Bucket, Tensor]] = []  # what the all-gather has brought
        # The weights of late micro-batches: of a checkpoint's first step, and for one that is saved now.
        self.stale: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.current: dict[str, Tensor] = {}  # after a resume: the weights after them
        self.is_under_way = False  # what has been applied and not put in
        self.waits_for_others = False  # the thread of the update
        self.holds_gradients = False  # that could not leave yet
        self.stream = None if self.device.type == "cpu" else torch.Stream(self.device)  # of the update

    def begin_step(self) -> None:
        self.kept = {}
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.stale:
            # The first step after a resume: it computes as it did before.
            self.current = copies(self.flat)
            self._overwrite(self.stale)
            self.stale = {}

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        if self.is_under_way:
            self.holds_gradients = True  # owners are still busy with those of the step before
            yield
            return
        with super().last_backward():
            yield

    def apply(self, local_stats: LocalStepStats, lr: float) -> Callable[[], GlobalStepStats]:
        assert not self.is_under_way, "no put_in since the last apply"
        if self.holds_gradients:
            with super().last_backward():
                self.holds_gradients = False
        assert self.next_bucket == len(self.buckets) and not self.leaving, "no gradients: see last_backward"
        self._predict()
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream())
        self.is_under_way, self.waits_for_others = True, False
        future: Future[GlobalStepStats] = Future()
        arguments = (future, local_stats, lr)
        # A daemon: a rank that ends does not wait for an exchange that will never end.
        threading.Thread(target=self._work, args=arguments, name="update", daemon=True).start()

        def wait() -> GlobalStepStats:
            with self.ranks.activity.waiting(lambda: not self.waits_for_others):
                return future.result()

        return wait

    @torch.no_grad()
    def apply_update(self, kept: bool) -> None:
        if self.current:
            self._overwrite(self.current)
            self.current = {}
        if not self.is_under_way:
            return
        if kept:
            self.kept = copies(self.flat)
        if self.stream is not None:
            torch.accelerator.current_stream().wait_stream(self.stream)
        self.streams.finish()
        for bucket, received in self.came:
            self.streams.used_by_current(received)
            self._take_in_now(bucket, received)
        self.came.clear()
        self.is_under_way = False

    def complete(self) -> None:
        pass  # see apply_update

    def close(self) -> None:
        # Its exchange would go on while the ranks part.
        assert not self.is_under_way, "no put_in since the last apply"
        super().close()

    def full_state_dict(self, wanted: Allocate | None) -> Callable[[], dict[str, Tensor]]:
        collect = super().full_state_dict(wanted)
        if not wanted:
            return collect
        stale, weight_delta = self.kept, copies(self.weight_delta, wanted)  # the next update is added to it
        own = {f"{name}.{STALE}": part for name, part in stale.items()}
        own |= {f"{name}.{WEIGHT_DELTA}": part for name, part in weight_delta.items()}
        return lambda: collect() | own

    def load(self, whole: dict[str, Tensor]) -> None:
        super().load(whole)
        # A checkpoint of a run without delay has neither of them: then no micro-batch of the first step is late.
        self.stale = {name: whole[text] for name in self.flat if (text := f"{name}.{STALE}") in whole}
        for name, weight_delta in self.weight_delta.items():
            if (text := f"{name}.{WEIGHT_DELTA}") in whole:
                weight_delta.copy_(whole[text])

    def _overwrite(self, weights: dict[str, Tensor]) -> None:
        for name, flat in self.flat.items():
            flat.copy_(weights[name])

    @torch.no_grad()
    def _predict(self) -> None:
        for name, weight_delta in self.weight_delta.items():
            self.flat[name].add_(weight_delta)

    def _work(self, future: Future[GlobalStepStats], local_stats: LocalStepStats, lr: float) -> None:
        try:
            torch.set_grad_enabled(False)
            if self.stream is not None:
                torch.accelerator.set_stream(self.stream)
            future.set_result(self._update(local_stats, lr))
        except BaseException as error:  # whatever it is: the main thread waits for this one
            future.set_exception(error)

    def _update(self, local_stats: LocalStepStats, lr: float) -> GlobalStepStats:
        global_stats = self._agree(local_stats)
        # Predicted weights have to be taken back also where there is no step.
        if self.weight_delta or not global_stats.left_out:
            self._send_weights(
                self._step(None if global_stats.left_out else self._factor(global_stats, local_stats), lr)
            )
            self._wait(self.wire.submitted)
        return global_stats

    def _wait(self, number: int) -> None:
        """In the thread of the update. Where it fails, the others are to blame, so the mark stays."""
        self.waits_for_others = True
        self.wire.wait(number)
        self.waits_for_others = False

    def _take_in(self, bucket: Bucket, received: Tensor) -> None:
        # Up to the card here, in a thread of the wire: the main thread would wait for all that it has asked for.
        self.came.append((bucket, received.to(self.device)))

    def _take_in_now(self, bucket: Bucket, received: Tensor) -> None:
        """As without a delay, and by how much it changes the weights over the whole step."""
        for shard, part in self._by_piece(bucket, received):
            place = slice(shard.start, shard.stop)
            target = self.flat[shard.name][place]
            if self.weight_delta:
                self.weight_delta[shard.name][place] += part if self.format.changes else part - target
            _ = target.add_(part) if self.format.changes else target.copy_(part)
