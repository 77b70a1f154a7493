"""The strategy `sharded`: every element of the parameters has an owner.

    reduce-scatter  during the last backward pass: gradients to their owners, which add them up in the order of the
                    ranks, fp32
    numbers         losses, tokens, and the sums of squares of the owned gradients, from every rank to every rank
    update          of the owned elements, with the optimizer's state that only the owner has
    all-gather      during the next forward pass: the new weights from their owners to all, awaited layer by layer

One rank computes each update and all take the same bytes, so parameters are bit-equal on all ranks, also on unlike
processors and GPUs. Each leg moves (N - 1) / N of the parameters per rank and direction, together what an all-reduce
moves; where ranks share the link of a node, see by_node.py. With fewer bits on the wire the all-gather carries what
is added to the weights, which all add alike, the owner too. bf16: to what it had before. int8 and int4: the owner has
weights of its own in fp32, and sends by how much they differ from everybody's, so that what a step rounds off is in
the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aura.cluster.dist_env import compiles, link_mbit
from aura.cluster.ranks import Ranks, collective
from aura.config import TrainConfig
from aura.optim.adamw import Optimizer
from aura.optim.muon import matrices_in, optimizer_of
from aura.optim.nesterov import MOMENTUM, Nesterov
from aura.strategy.buckets import Bucket, Shard, cut_into_buckets, owners
from aura.strategy.by_node import collectives_of
from aura.strategy.checksum import checksum, make_equal
from aura.strategy.codec import bytes_of
from aura.strategy.collectives import GradientSum
from aura.strategy.formats import WireFormat, format_of
from aura.strategy.gather import full_state_dict, outline_of, shapes_of
from aura.strategy.interface import GlobalStepStats, LocalStepStats, Strategy, clip_factor, global_stats_of
from aura.strategy.owner_shard import OwnerShard
from aura.strategy.state import MASTER, Allocate, key, take
from aura.strategy.wire import AdaptiveTimeout, Exchange, Wire

# What a rank sends in one bucket, at the most, in the format of the wire: 34 ms at 1 Gbit/s, 0.34 s at 100 Mbit/s.
BUCKET_BYTES = 4 * 2**20
# A small model's gradients leave while it computes, too, and what several senders send to one port at once is smaller:
# so many buckets, where each of them, in fp32, still keeps the link busy for so long. A step of gpt2-nano on five
# ranks, at 100 Mbit/s: 0.61 s with two buckets, 0.50 with 8 and 0.48 with 16; at 1 Gbit/s: 0.18 s with 8, 0.16 with
# two.
FEWEST_BUCKETS = 16
BUCKET_SECONDS = 0.01
# Of a checkpoint: one with another format on the wire has the weights and no more, one of another strategy no outer
# momentum.
MAY_LACK = (MASTER, MOMENTUM)


class Sharded(Strategy):
    awaits_by_layer = True  # the weights of the all-gather, where the model lets us

    def __init__(self, model: nn.Module, ranks: Ranks, config: TrainConfig) -> None:
        """All ranks have to call this together."""
        self.model, self.ranks, self.config = model, ranks, config
        self.parameters = dict(model.named_parameters())
        self.flat = {name: parameter.data.view(-1) for name, parameter in self.parameters.items()}
        first = next(iter(self.flat.values()))
        self.device = first.device
        self.format = format_of(config, first.dtype)
        as_they_are = WireFormat(first.dtype, changes=False, master=False)
        weight_format = self.format if self.format.changes else as_they_are
        self.owned, self.buckets = owned_in_buckets(model, ranks, config)
        matrices = set(_matrices(model, config))
        self.own_shard = OwnerShard(self.parameters, self.owned[ranks.rank], matrices, self.format.master)
        self.has_loaded = False
        self.optimizer = owners_optimizer(self.own_shard, config)
        self.gradient = GradientSum(self.own_shard.gradient, ranks.world_size)
        self.buckets_of: dict[str, list[int]] = {name: [] for name in self.parameters}
        for number, bucket in enumerate(self.buckets):
            for name in bucket.names:
                self.buckets_of[name].append(number)
        with collective():
            timeout = timedelta(seconds=config.collective_timeout)
            group = dist.new_group(timeout=timeout)
            # For what is exchanged while steps go on, out of the CPU's memory.
            self.beside = dist.new_group(timeout=timeout, backend="gloo")
            self.collectives = collectives_of(
                ranks, group, timeout, (self.format, weight_format), self.gradient
            )
        self.streams = self.collectives.streams
        patience = AdaptiveTimeout(config.collective_timeout)
        self.wire = Wire(patience, self.streams.prepare_thread, self.collectives.communicators)
        if ranks.device.type != "cpu":
            # NCCL: operations of two groups at once may wait for each other for ever, unless all ranks have one order.
            ranks.before_collective = self.complete
        self.leaving = False  # gradients of this backward pass are those of the step
        self.next_bucket = len(self.buckets)  # the first whose gradients have not left
        # The all-gather of every bucket, as the wire numbers it
        self.weights: list[int] = [0] * len(self.buckets)
        # A compiled model has no place for Python between its layers.
        self.layer_by_layer = self.awaits_by_layer and not compiles(config, self.device)
        self._hook_up()

    def start(self) -> None:
        make_equal(self.ranks, [*self.flat.values(), *self.model.buffers()])
        if not self.has_loaded:
            self.own_shard.begin_anew()

    def begin_step(self) -> None:
        if not self.layer_by_layer:
            self.complete()
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """A parameter without a gradient, on this rank or on all, has a gradient of zeros."""
        # All layers have waited for their weights, but one that is left out has not.
        self.complete()
        self.gradient.begin()
        self.next_bucket = 0
        self.missing = [set(bucket.names) for bucket in self.buckets]
        self.unsent = {name: len(numbers) for name, numbers in self.buckets_of.items()}
        self.streams.wait_for_current()
        self.leaving = True
        try:
            yield
        finally:
            self.leaving = False
        while self.next_bucket < len(self.buckets):
            self._send_gradients()

    @torch.no_grad()
    def apply(self, local_stats: LocalStepStats, lr: float) -> Callable[[], GlobalStepStats]:
        assert self.next_bucket == len(self.buckets) and not self.leaving, "no gradients: see last_backward"
        if self.device.type != "cpu":
            # Nothing has left before that either, but it is no waiting for others: whose GPU hangs is to blame.
            torch.accelerator.current_stream().synchronize()
        global_stats = self._update(local_stats, lr)
        return lambda: global_stats

    def _update(self, local_stats: LocalStepStats, lr: float) -> GlobalStepStats:
        global_stats = self._agree(local_stats)
        if not global_stats.left_out:
            self._send_weights(self._step(self._factor(global_stats, local_stats), lr))
        return global_stats

    def _agree(self, local_stats: LocalStepStats) -> GlobalStepStats:
        """What all ranks know once all gradients are with their owners."""
        self._wait(self.wire.submitted)
        self.streams.finish()
        loss_sum = torch.as_tensor(local_stats.loss_sum, dtype=torch.float64, device=self.device)
        # The one time in a step that the host reads what the device has computed
        sums = torch.stack([loss_sum, self.gradient.squares])
        loss, squares, *bad = torch.cat([sums, self.gradient.bad().double()]).tolist()
        row = [
            loss,
            float(local_stats.tokens),
            float(local_stats.stop),
            squares / local_stats.loss_scale**2,
            *bad,
        ]
        global_stats = global_stats_of(self._from_all(row))
        self.wire.patience.step_is_done()
        return global_stats

    def _factor(self, global_stats: GlobalStepStats, local_stats: LocalStepStats) -> float:
        return (
            clip_factor(global_stats.gradient_norm, self.config.clip, global_stats.tokens)
            / local_stats.loss_scale
        )

    def _step(self, factor: float | None, lr: float) -> Tensor:
        """What the all-gather carries of the owned elements after the optimizer's step, or without one."""
        before = self.own_shard.weights() if self.format.changes else None
        if self.own_shard.views and factor is not None:
            self.own_shard.gradient.mul_(factor)
            self.optimizer.step(lr)
        after = self.own_shard.values()
        if before is not None:
            after = after.sub_(before)
            self.own_shard.take_back(before)
        return after

    def complete(self) -> None:
        self._await_weights(0)

    def expect_delay(self) -> None:
        self.wire.patience.delayed = True

    def compare(self) -> list[int]:
        self.complete()
        return self.ranks.odd_ones(checksum(self.flat.values()))

    def state(self) -> dict[str, Tensor]:
        """This rank's part of the optimizer's, by `key`."""
        return {key(shard, kind): tensor for shard, kind, tensor in self._owned_state()}

    def full_state_dict(self, wanted: Allocate | None) -> Callable[[], dict[str, Tensor]]:
        outline = outline_of(self.parameters)
        outlined = owners_optimizer(outline, self.config).tensors()
        if self.format.master:
            outlined |= {f"{name}.{MASTER}": part.float() for name, part in outline.named_parameters()}
        shapes = shapes_of(self.parameters, outlined)
        return full_state_dict(self.beside, self.owned, self.state(), shapes, wanted)

    def load(self, whole: dict[str, Tensor]) -> None:
        self.own_shard.begin_anew()
        for shard, kind, tensor in self._owned_state():
            if kind not in MAY_LACK or f"{shard.name}.{kind}" in whole:
                take(whole, shard, kind, tensor)
        self.has_loaded = True

    def close(self) -> None:
        self.complete()
        self.wire.close()

    def _owned_state(self) -> Iterator[tuple[Shard, str, Tensor]]:
        for text, tensor in self.optimizer.tensors().items():
            name, _, kind = text.rpartition(".")
            yield self.own_shard.shards[name], kind, tensor
        if self.format.master:
            for name, view in self.own_shard.views.items():
                yield self.own_shard.shards[name], MASTER, view.data

    # Reduce-scatter

    def _hook_up(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))  # type: ignore[no-untyped-call]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in self.model.modules() if self.layer_by_layer else ():
            own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
            if own:
                # The buckets come in from the last to the first.
                first = min(number for name in own for number in self.buckets_of[name])
                module.register_forward_pre_hook(self._forward_hook(first))

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            if not self.leaving:
                return
            for number in self.buckets_of[name]:
                self.missing[number].discard(name)
            # In the order that is the same on all ranks, whatever the order of the gradients
            while self.next_bucket < len(self.buckets) and not self.missing[self.next_bucket]:
                self._send_gradients()

        return gradient_is_there

    @torch.no_grad()
    def _send_gradients(self) -> None:
        bucket = self.buckets[self.next_bucket]
        nothing = self.own_shard.gradient.new_empty(
            0, dtype=self.own_shard.format
        )  # torch.cat wants something
        groups = [[nothing, *map(self._gradient, shards)] for shards in bucket.shards]
        kind = "gradients" if self.next_bucket else "first gradients"
        self.wire.submit(self.collectives.gradients(kind, bucket, groups))
        self.next_bucket += 1
        for name in bucket.names:
            self.unsent[name] -= 1
            if not self.unsent[name]:
                self.parameters[name].grad = None

    def _gradient(self, shard: Shard) -> Tensor:
        gradient = self.parameters[shard.name].grad
        if gradient is None:
            return torch.zeros(len(shard), dtype=self.flat[shard.name].dtype, device=self.device)
        return gradient.reshape(-1)[shard.start : shard.stop]

    # Numbers

    def _from_all(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, in fp64."""
        lengths = [len(row)] * self.ranks.world_size
        rows: list[list[float]] = []
        sent = torch.tensor(row * self.ranks.world_size, dtype=torch.float64, device=self.ranks.device)

        def use(received: Tensor) -> None:
            rows.extend(received.view(-1, len(row)).tolist())

        numbers = Exchange("numbers", self.collectives.everybody, lambda: sent, lengths, lengths, use)
        self._wait(self.wire.submit(numbers))
        return rows

    # All-gather

    def _send_weights(self, stream: Tensor) -> None:
        """stream: the owned weights, or what is added to them. The last bucket of the backward pass goes first: the
        next forward pass begins with its layers."""
        self.streams.wait_for_current()
        for number in reversed(range(len(self.buckets))):
            bucket = self.buckets[number]
            own = stream[bucket.start : bucket.stops[self.ranks.rank]]
            kind = "weights" if number < len(self.buckets) - 1 else "first weights"
            self.weights[number] = self.wire.submit(
                self.collectives.weights(kind, bucket, own, self._take_in)
            )

    def _take_in(self, bucket: Bucket, received: Tensor) -> None:
        """Everybody takes what was sent, its owner too: whatever the wire does to it, it is the same for all."""
        shards, parts = zip(*self._by_piece(bucket, received), strict=True)
        targets = [self.flat[shard.name][shard.start : shard.stop] for shard in shards]
        if self.format.changes:
            torch._foreach_add_(targets, parts)
        else:
            torch._foreach_copy_(targets, parts)

    def _by_piece(self, bucket: Bucket, received: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """What has come, decoded, and where it belongs."""
        of_owners = self.collectives.of_owners(bucket, received)
        for shards, values in zip(bucket.shards, of_owners, strict=True):
            yield from zip(shards, torch.split(values, [len(shard) for shard in shards]), strict=True)

    def _await_weights(self, number: int) -> None:
        """Until this bucket and all behind it are in the parameters."""
        self._wait(self.weights[number])
        self.streams.finish()

    def _forward_hook(self, number: int) -> Callable[..., None]:
        return lambda *_: self._await_weights(number)

    def _wait(self, number: int) -> None:
        with self.ranks.activity.waiting():
            self.wire.wait(number)


def owners_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Of what an owner has; of rounds the outer one."""
    if config.strategy == "rounds":
        return Nesterov(model, config.outer_momentum)
    return optimizer_of(model, config)


def owned_in_buckets(
    model: nn.Module, ranks: Ranks, config: TrainConfig
) -> tuple[list[list[Shard]], list[Bucket]]:
    """What every rank owns, and in which buckets it goes over the wire. All ranks have to call this together."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    owned = owners(shapes, _matrices(model, config), ranks.world_size)
    slowest = min(speed for (speed,) in ranks.gather([math.ceil(link_mbit())]))
    return owned, cut_into_buckets(owned, _bucket_count(owned, config.wire, slowest))


def _matrices(model: nn.Module, config: TrainConfig) -> dict[str, int]:
    return whole_matrices(model) if config.optimizer == "muon" else {}


def whole_matrices(model: nn.Module) -> dict[str, int]:
    """What Muon needs whole, and of how many matrices each consists."""
    parts = {name: matrices_in(name, parameter) for name, parameter in model.named_parameters()}
    return {name: count for name, count in parts.items() if count}


def _bucket_count(owned: list[list[Shard]], wire: str, mbit: float) -> int:
    """mbit: of the slowest link [Mbit/s]."""
    peers, longest = len(owned) - 1, max(sum(map(len, stream)) for stream in owned)
    seconds = peers * longest * 32e-6 / mbit  # in fp32
    at_least = min(FEWEST_BUCKETS, math.ceil(seconds / BUCKET_SECONDS))
    return max(1, at_least, math.ceil(peers * bytes_of(wire, longest) / BUCKET_BYTES))
