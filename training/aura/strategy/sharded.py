"""The strategy `sharded`: every element of the parameters has an owner.

    leg 1   during the last backward pass: gradients to their owners, which add them up in the order of the ranks, fp32
    numbers losses, tokens, and the sums of squares of the owned gradients, from every rank to every rank
    update  of the owned elements, with the optimizer's state that only the owner has
    leg 2   during the next forward pass: the new weights from their owners to all, awaited layer by layer

One rank computes each update and all take the same bytes, so parameters are bit-equal on all ranks, also on unlike
processors and GPUs. Each leg moves (N - 1) / N of the parameters per rank and direction, together what an all-reduce
moves; where ranks share the link of a node, see by_node.py. With fewer bits on the wire leg 2 carries what is added
to the weights, which all add alike, the owner too. bf16: to what it had before. int8 and int4: the owner has
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

from aura.cluster.place import compiles, link_mbit
from aura.cluster.ranks import Ranks, collective
from aura.config import TrainConfig
from aura.optim.adamw import Optimizer
from aura.optim.muon import matrices_in, optimizer_of
from aura.optim.nesterov import MOMENTUM, Nesterov
from aura.strategy.by_node import legs_of
from aura.strategy.checksum import checksum, make_equal
from aura.strategy.codec import bytes_of
from aura.strategy.formats import WireFormat, format_of
from aura.strategy.gather import outline_of, shapes_of, whole_state
from aura.strategy.interface import Outcome, Strategy, Told, clip_factor, outcome_of
from aura.strategy.legs import GradientSum
from aura.strategy.pieces import Round, Segment, owners, rounds
from aura.strategy.shard import Shard
from aura.strategy.state import MASTER, Allocate, key, take
from aura.strategy.wire import Exchange, Patience, Wire

# What a rank sends in one round, at the most, in the format of the wire: 34 ms at 1 Gbit/s, 0.34 s at 100 Mbit/s.
ROUND_BYTES = 4 * 2**20
# A small model's gradients leave while it computes, too, and what several senders send to one port at once is smaller:
# so many rounds, where each of them, in fp32, still keeps the link busy for so long. A step of gpt2-nano on five ranks,
# at 100 Mbit/s: 0.61 s with two rounds, 0.50 with 8 and 0.48 with 16; at 1 Gbit/s: 0.18 s with 8, 0.16 with two.
FEWEST_ROUNDS = 16
ROUND_SECONDS = 0.01
# Of a checkpoint: one with another format on the wire has the weights and no more, one of another strategy no outer
# momentum.
MAY_LACK = (MASTER, MOMENTUM)


class Sharded(Strategy):
    awaits_by_layer = True  # the weights of leg 2, where the model lets us

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
        self.owned, self.rounds = owned_in_rounds(model, ranks, config)
        matrices = set(_matrices(model, config))
        self.shard = Shard(self.parameters, self.owned[ranks.rank], matrices, self.format.master)
        self.has_loaded = False
        self.optimizer = owners_optimizer(self.shard, config)
        self.gradient = GradientSum(self.shard.gradient, ranks.world_size)
        self.rounds_of: dict[str, list[int]] = {name: [] for name in self.parameters}
        for number, round_ in enumerate(self.rounds):
            for name in round_.names:
                self.rounds_of[name].append(number)
        with collective():
            timeout = timedelta(seconds=config.collective_timeout)
            group = dist.new_group(timeout=timeout)
            # For what is exchanged while steps go on, out of the CPU's memory.
            self.beside = dist.new_group(timeout=timeout, backend="gloo")
            self.legs = legs_of(ranks, group, timeout, (self.format, weight_format), self.gradient)
        self.streams = self.legs.streams
        patience = Patience(config.collective_timeout)
        self.wire = Wire(patience, self.streams.prepare_thread, self.legs.lanes)
        if ranks.device.type != "cpu":
            # NCCL: operations of two groups at once may wait for each other for ever, unless all ranks have one order.
            ranks.before_collective = self.complete
        self.leaving = False  # gradients of this backward pass are those of the step
        self.next_round = len(self.rounds)  # the first whose gradients have not left
        self.weights: list[int] = [0] * len(self.rounds)  # leg 2 of every round, as the wire numbers it
        # A compiled model has no place for Python between its layers.
        self.layer_by_layer = self.awaits_by_layer and not compiles(config, self.device)
        self._hook_up()

    def start(self) -> None:
        make_equal(self.ranks, [*self.flat.values(), *self.model.buffers()])
        if not self.has_loaded:
            self.shard.begin_anew()

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
        self.next_round = 0
        self.missing = [set(round_.names) for round_ in self.rounds]
        self.unsent = {name: len(numbers) for name, numbers in self.rounds_of.items()}
        self.streams.wait_for_current()
        self.leaving = True
        try:
            yield
        finally:
            self.leaving = False
        while self.next_round < len(self.rounds):
            self._send_gradients()

    @torch.no_grad()
    def apply(self, told: Told, lr: float) -> Callable[[], Outcome]:
        assert self.next_round == len(self.rounds) and not self.leaving, "no gradients: see last_backward"
        if self.device.type != "cpu":
            # Nothing has left before that either, but it is no waiting for others: whose GPU hangs is to blame.
            torch.accelerator.current_stream().synchronize()
        outcome = self._update(told, lr)
        return lambda: outcome

    def _update(self, told: Told, lr: float) -> Outcome:
        outcome = self._agree(told)
        if not outcome.left_out:
            self._send_weights(self._step(self._factor(outcome, told), lr))
        return outcome

    def _agree(self, told: Told) -> Outcome:
        """What all ranks know once all gradients are with their owners."""
        self._wait(self.wire.submitted)
        self.streams.finish()
        loss_sum = torch.as_tensor(told.loss_sum, dtype=torch.float64, device=self.device)
        # The one time in a step that the host reads what the device has computed
        sums = torch.stack([loss_sum, self.gradient.squares])
        loss, squares, *bad = torch.cat([sums, self.gradient.bad().double()]).tolist()
        row = [loss, float(told.tokens), float(told.stop), squares / told.loss_scale**2, *bad]
        outcome = outcome_of(self._from_all(row))
        self.wire.patience.step_is_done()
        return outcome

    def _factor(self, outcome: Outcome, told: Told) -> float:
        return clip_factor(outcome.gradient_norm, self.config.clip, outcome.tokens) / told.loss_scale

    def _step(self, factor: float | None, lr: float) -> Tensor:
        """What leg 2 carries of the owned elements after the optimizer's step, or without one."""
        before = self.shard.weights() if self.format.changes else None
        if self.shard.views and factor is not None:
            self.shard.gradient.mul_(factor)
            self.optimizer.step(lr)
        after = self.shard.values()
        if before is not None:
            after = after.sub_(before)
            self.shard.take_back(before)
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
        return {key(segment, kind): tensor for segment, kind, tensor in self._owned_state()}

    def whole_state(self, wanted: Allocate | None) -> Callable[[], dict[str, Tensor]]:
        outline = outline_of(self.parameters)
        outlined = owners_optimizer(outline, self.config).tensors()
        if self.format.master:
            outlined |= {f"{name}.{MASTER}": part.float() for name, part in outline.named_parameters()}
        shapes = shapes_of(self.parameters, outlined)
        return whole_state(self.beside, self.owned, self.state(), shapes, wanted)

    def load(self, whole: dict[str, Tensor]) -> None:
        self.shard.begin_anew()
        for segment, kind, tensor in self._owned_state():
            if kind not in MAY_LACK or f"{segment.name}.{kind}" in whole:
                take(whole, segment, kind, tensor)
        self.has_loaded = True

    def close(self) -> None:
        self.complete()
        self.wire.close()

    def _owned_state(self) -> Iterator[tuple[Segment, str, Tensor]]:
        for text, tensor in self.optimizer.tensors().items():
            name, _, kind = text.rpartition(".")
            yield self.shard.segments[name], kind, tensor
        if self.format.master:
            for name, view in self.shard.views.items():
                yield self.shard.segments[name], MASTER, view.data

    # Leg 1

    def _hook_up(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))  # type: ignore[no-untyped-call]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in self.model.modules() if self.layer_by_layer else ():
            own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
            if own:
                # The rounds come in from the last to the first.
                first = min(number for name in own for number in self.rounds_of[name])
                module.register_forward_pre_hook(self._forward_hook(first))

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            if not self.leaving:
                return
            for number in self.rounds_of[name]:
                self.missing[number].discard(name)
            # In the order that is the same on all ranks, whatever the order of the gradients
            while self.next_round < len(self.rounds) and not self.missing[self.next_round]:
                self._send_gradients()

        return gradient_is_there

    @torch.no_grad()
    def _send_gradients(self) -> None:
        round_ = self.rounds[self.next_round]
        nothing = self.shard.gradient.new_empty(0, dtype=self.shard.format)  # torch.cat wants something
        groups = [[nothing, *map(self._gradient, pieces)] for pieces in round_.pieces]
        kind = "gradients" if self.next_round else "first gradients"
        self.wire.submit(self.legs.gradients(kind, round_, groups))
        self.next_round += 1
        for name in round_.names:
            self.unsent[name] -= 1
            if not self.unsent[name]:
                self.parameters[name].grad = None

    def _gradient(self, piece: Segment) -> Tensor:
        gradient = self.parameters[piece.name].grad
        if gradient is None:
            return torch.zeros(len(piece), dtype=self.flat[piece.name].dtype, device=self.device)
        return gradient.reshape(-1)[piece.start : piece.stop]

    # Numbers

    def _from_all(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, in fp64."""
        lengths = [len(row)] * self.ranks.world_size
        rows: list[list[float]] = []
        sent = torch.tensor(row * self.ranks.world_size, dtype=torch.float64, device=self.ranks.device)

        def use(received: Tensor) -> None:
            rows.extend(received.view(-1, len(row)).tolist())

        numbers = Exchange("numbers", self.legs.everybody, lambda: sent, lengths, lengths, use)
        self._wait(self.wire.submit(numbers))
        return rows

    # Leg 2

    def _send_weights(self, stream: Tensor) -> None:
        """stream: the owned weights, or what is added to them. The last round of the backward pass goes first: the
        next forward pass begins with its layers."""
        self.streams.wait_for_current()
        for number in reversed(range(len(self.rounds))):
            round_ = self.rounds[number]
            own = stream[round_.start : round_.stops[self.ranks.rank]]
            kind = "weights" if number < len(self.rounds) - 1 else "first weights"
            self.weights[number] = self.wire.submit(self.legs.weights(kind, round_, own, self._take_in))

    def _take_in(self, round_: Round, received: Tensor) -> None:
        """Everybody takes what was sent, its owner too: whatever the wire does to it, it is the same for all."""
        pieces, parts = zip(*self._by_piece(round_, received), strict=True)
        targets = [self.flat[piece.name][piece.start : piece.stop] for piece in pieces]
        if self.format.changes:
            torch._foreach_add_(targets, parts)
        else:
            torch._foreach_copy_(targets, parts)

    def _by_piece(self, round_: Round, received: Tensor) -> Iterator[tuple[Segment, Tensor]]:
        """What has come, decoded, and where it belongs."""
        of_owners = self.legs.of_owners(round_, received)
        for pieces, values in zip(round_.pieces, of_owners, strict=True):
            yield from zip(pieces, torch.split(values, [len(piece) for piece in pieces]), strict=True)

    def _await_weights(self, number: int) -> None:
        """Until this round and all rounds behind it are in the parameters."""
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


def owned_in_rounds(
    model: nn.Module, ranks: Ranks, config: TrainConfig
) -> tuple[list[list[Segment]], list[Round]]:
    """What every rank owns, and in which rounds it goes over the wire. All ranks have to call this together."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    owned = owners(shapes, _matrices(model, config), ranks.world_size)
    slowest = min(speed for (speed,) in ranks.gather([math.ceil(link_mbit())]))
    return owned, rounds(owned, _round_count(owned, config.wire, slowest))


def _matrices(model: nn.Module, config: TrainConfig) -> dict[str, int]:
    return whole_matrices(model) if config.optimizer == "muon" else {}


def whole_matrices(model: nn.Module) -> dict[str, int]:
    """What Muon needs whole, and of how many matrices each consists."""
    parts = {name: matrices_in(name, parameter) for name, parameter in model.named_parameters()}
    return {name: count for name, count in parts.items() if count}


def _round_count(owned: list[list[Segment]], wire: str, mbit: float) -> int:
    """mbit: of the slowest link [Mbit/s]."""
    peers, longest = len(owned) - 1, max(sum(map(len, stream)) for stream in owned)
    seconds = peers * longest * 32e-6 / mbit  # in fp32
    at_least = min(FEWEST_ROUNDS, math.ceil(seconds / ROUND_SECONDS))
    return max(1, at_least, math.ceil(peers * bytes_of(wire, longest) / ROUND_BYTES))
