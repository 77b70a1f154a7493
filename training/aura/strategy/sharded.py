"""The strategy `sharded`: every element of the parameters has an owner.

    leg 1   during the last backward pass: gradients to their owners, which add them up in the order of the ranks, fp32
    numbers losses, tokens, and the sums of squares of the owned gradients, from every rank to every rank
    update  of the owned elements, with the optimizer's state that only the owner has
    leg 2   during the next forward pass: the new weights from their owners to all, awaited layer by layer

One rank computes each update and all take the same bytes, so parameters are bit-equal on all ranks, also on unlike
processors and GPUs. Each leg moves (N - 1) / N of the parameters per rank and direction, together what an all-reduce
moves. With fewer bits on the wire leg 2 carries what is added to the weights, which all add alike, the owner too.
bf16: to what it had before. int8 and int4: the owner has weights of its own in fp32, and sends by how much they differ
from everybody's, so that what a step rounds off is in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aura.cluster.place import compiles
from aura.cluster.ranks import Ranks, collective
from aura.config import TrainConfig
from aura.optim.muon import optimizer_of
from aura.strategy.checksum import checksum, make_equal
from aura.strategy.formats import Plain, WireFormat, format_of
from aura.strategy.gather import Outline, shapes_of, whole_state
from aura.strategy.interface import Outcome, Told, clip_factor, outcome_of
from aura.strategy.pieces import Round, Segment, owners, rounds
from aura.strategy.shard import Shard
from aura.strategy.state import MASTER, as_saved, key, put_together
from aura.strategy.wire import Exchange, Patience, Wire

# What a rank sends in one round, at the most: 34 ms at 1 Gbit/s, 0.34 s at 100 Mbit/s.
ROUND_BYTES = 4 * 2**20
# A small model's gradients leave while it computes, too, and four senders at once do not fill the buffer of a switch's
# port: at 100 Mbit/s, with half as many rounds, a step of gpt2-nano waited 0.1 s for packets that were sent again.
FEWEST_ROUNDS = 8


class Sharded:
    gathers = True

    def __init__(self, model: nn.Module, ranks: Ranks, config: TrainConfig) -> None:
        """All ranks have to call this together."""
        self.model, self.ranks, self.config = model, ranks, config
        self.parameters = dict(model.named_parameters())
        self.flat = {name: parameter.data.view(-1) for name, parameter in self.parameters.items()}
        first = next(iter(self.flat.values()))
        self.device = first.device
        self.format = format_of(config, first.dtype)
        self.weight_format: WireFormat = (
            self.format if self.format.changes else Plain(first.dtype, changes=False)
        )
        matrices = whole_matrices(model) if config.optimizer == "muon" else {}
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self.owned = owners(shapes, matrices, ranks.world_size)
        self.rounds = rounds(self.owned, _round_count(self.owned))
        self.shard = Shard(self.parameters, self.owned[ranks.rank], set(matrices), self.format.master)
        self.has_loaded = False
        self.optimizer = optimizer_of(self.shard, config)
        # Of this rank's owned gradient: the sum of squares, and which ranks' parts are not finite
        self.squares = torch.zeros((), dtype=torch.float64, device=self.device)
        self.bad = torch.zeros(ranks.world_size, dtype=torch.bool, device=self.device)
        self.rounds_of: dict[str, list[int]] = {name: [] for name in self.parameters}
        for number, round_ in enumerate(self.rounds):
            for name in round_.names:
                self.rounds_of[name].append(number)
        with collective():
            timeout = timedelta(seconds=config.collective_timeout)
            self.group = dist.new_group(timeout=timeout)
            # For what is exchanged while steps go on, out of the CPU's memory.
            self.beside = dist.new_group(timeout=timeout, backend="gloo")
        self.side: torch.cuda.Stream | None = None  # of the thread
        if self.device.type == "cuda":
            self.side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.wire = Wire(Patience(config.collective_timeout), self._prepare_thread)
        self.leaving = False  # gradients of this backward pass are those of the step
        self.next_round = len(self.rounds)  # the first whose gradients have not left
        self.weights: list[int] = [0] * len(self.rounds)  # leg 2 of every round, as the wire numbers it
        self._hook_up(layer_by_layer=not compiles(config, self.device))

    def start(self) -> None:
        make_equal(self.ranks, list(self.flat.values()))
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
        self.squares.zero_()
        self.bad.zero_()
        self.next_round = 0
        self.missing = [set(round_.names) for round_ in self.rounds]
        self.unsent = {name: len(numbers) for name, numbers in self.rounds_of.items()}
        self._side_waits()
        self.leaving = True
        try:
            yield
        finally:
            self.leaving = False
        while self.next_round < len(self.rounds):
            self._send_gradients()

    @torch.no_grad()
    def apply(self, told: Told, lr: float) -> Outcome:
        assert self.next_round == len(self.rounds) and not self.leaving, "no gradients: see last_backward"
        if self.side is not None:
            # Nothing has left before that either, but it is no waiting for others: whose GPU hangs is to blame.
            torch.cuda.current_stream().synchronize()
        self._wait(self.wire.submitted)
        self._wait_for_side()
        loss_sum = torch.as_tensor(told.loss_sum, dtype=torch.float64, device=self.device)
        # The one time in a step that the host reads what the device has computed
        loss, squares, *bad = torch.cat([torch.stack([loss_sum, self.squares]), self.bad.double()]).tolist()
        row = [loss, float(told.tokens), float(told.stop), squares / told.loss_scale**2, *bad]
        outcome = outcome_of(self._from_all(row))
        self.wire.patience.step_is_done()
        if outcome.left_out:
            return outcome
        factor = clip_factor(outcome.gradient_norm, self.config.clip, outcome.tokens)
        self.shard.gradient.mul_(factor / told.loss_scale)
        before = self.shard.weights() if self.format.changes else None
        if self.shard.views:
            self.optimizer.step(lr)
        after = self.shard.values()
        if before is not None:
            after = after.sub_(before)
            self.shard.take_back(before)
        self._send_weights(after)
        return outcome

    def complete(self) -> None:
        self._await_weights(0)

    def expect_delay(self) -> None:
        self.wire.patience.delayed = True

    def agrees_after(self, step: int) -> bool:
        return True

    def compare(self) -> list[int]:
        self.complete()
        return self.ranks.odd_ones(checksum(self.flat.values()))

    def state(self) -> dict[str, Tensor]:
        return {name: as_saved(tensor, kind) for name, (_, kind, tensor) in self._named_state().items()}

    def whole_state(self, wanted: bool, copied: bool) -> Callable[[], dict[str, Tensor]]:
        outline = Outline(self.parameters)
        outlined = optimizer_of(outline, self.config).tensors()
        if self.format.master:
            outlined |= {f"{name}.{MASTER}": part.float() for name, part in outline.named_parameters()}
        shapes = shapes_of(self.parameters, outlined)
        return whole_state(self.beside, self.owned, self.state(), shapes, wanted)

    def load(self, *parts: dict[str, Tensor]) -> None:
        wanted = self._named_state()
        if self.format.master:
            self.shard.begin_anew()
            if not any(name.split("[")[0].endswith(f".{MASTER}") for part in parts for name in part):
                # Written with another format on the wire: the weights are all there is.
                wanted = {text: one for text, one in wanted.items() if one[1] != MASTER}
        put_together(wanted, parts)
        self.has_loaded = True

    def close(self) -> None:
        self.complete()
        self.wire.close()

    def _named_state(self) -> dict[str, tuple[Segment, str, Tensor]]:
        named = {}
        for text, tensor in self.optimizer.tensors().items():
            name, _, kind = text.rpartition(".")
            segment = self.shard.segments[name]
            named[key(segment, kind)] = (segment, kind, tensor)
        if self.format.master:
            for name, view in self.shard.views.items():
                segment = self.shard.segments[name]
                named[key(segment, MASTER)] = (segment, MASTER, view.data.view(-1))
        return named

    # Leg 1

    def _hook_up(self, layer_by_layer: bool) -> None:
        """layer_by_layer: a compiled model has no place for Python between its layers."""
        self.layer_by_layer = layer_by_layer
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))  # type: ignore[no-untyped-call]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in self.model.modules() if layer_by_layer else ():
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
        units = [self.format.units(length) for length in round_.lengths]
        self._submit(
            "gradients" if self.next_round else "first gradients",
            self._on_the_wire(self.format.pack(groups)),
            units,
            [units[self.ranks.rank]] * self.ranks.world_size,
            partial(self._add_up, round_),
        )
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

    def _add_up(self, round_: Round, received: Tensor) -> None:
        """In the order of the ranks, never in that of arrival; in fp32."""
        length = round_.lengths[self.ranks.rank]
        if not length:
            return
        parts = self.format.unpack(received.to(self.device), [length] * self.ranks.world_size)
        total = self.shard.gradient[round_.start : round_.start + length]
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        wide = total.double()
        self.squares += wide.dot(wide)
        # A sum is finite when its terms are, unless they are about as large as fp32 can hold.
        self.bad |= ~torch.stack([part.sum(dtype=torch.float32) for part in parts]).isfinite()

    # Numbers

    def _from_all(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, in fp64."""
        lengths = [len(row)] * self.ranks.world_size
        rows: list[list[float]] = []
        sent = torch.tensor(row * self.ranks.world_size, dtype=torch.float64, device=self.ranks.device)

        def use(received: Tensor) -> None:
            rows.extend(received.view(-1, len(row)).tolist())

        self._wait(self._submit("numbers", lambda: sent, lengths, lengths, use))
        return rows

    # Leg 2

    def _send_weights(self, stream: Tensor) -> None:
        """stream: the owned weights, or what is added to them. The last round of the backward pass goes first: the
        next forward pass begins with its layers."""
        self._side_waits()
        me, everybody = self.ranks.rank, self.ranks.world_size
        for number in reversed(range(len(self.rounds))):
            round_ = self.rounds[number]
            packed = self.weight_format.pack([[stream[round_.start : round_.stops[me]]]])
            units = [self.weight_format.units(length) for length in round_.lengths]
            self.weights[number] = self._submit(
                "weights" if number < len(self.rounds) - 1 else "first weights",
                partial(_for_everybody, self._on_the_wire(packed), everybody),
                [units[me]] * everybody,
                units,
                partial(self._take_in, round_),
            )

    def _take_in(self, round_: Round, received: Tensor) -> None:
        """Everybody takes what was sent, its owner too: whatever the wire does to it, it is the same for all."""
        of_owners = self.weight_format.unpack(received.to(self.device), round_.lengths)
        for pieces, values in zip(round_.pieces, of_owners, strict=True):
            for piece, part in zip(
                pieces, torch.split(values, [len(piece) for piece in pieces]), strict=True
            ):
                target = self.flat[piece.name][piece.start : piece.stop]
                _ = target.add_(part) if self.format.changes else target.copy_(part)

    def _await_weights(self, number: int) -> None:
        """Until this round and all rounds behind it are in the parameters."""
        self._wait(self.weights[number])
        self._wait_for_side()

    def _forward_hook(self, number: int) -> Callable[..., None]:
        return lambda *_: self._await_weights(number)

    # The wire, and the GPU's streams. The thread has its own, so that what comes does not queue up behind a
    # backward pass.

    def _submit(
        self,
        kind: str,
        pack: Callable[[], Tensor],
        to_ranks: list[int],
        from_ranks: list[int],
        use: Callable[[Tensor], None],
    ) -> int:
        return self.wire.submit(Exchange(kind, self.group, pack, to_ranks, from_ranks, use))

    def _wait(self, number: int) -> None:
        with self.ranks.activity.waiting():
            self.wire.wait(number)

    def _on_the_wire(self, packed: Tensor) -> Callable[[], Tensor]:
        """It, on the device that the wire takes it from; the function waits for it."""
        if self.side is None:
            return lambda: packed
        if self.ranks.device.type == "cpu":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            packed = host.copy_(packed, non_blocking=True)
        else:
            packed.record_stream(self.side)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()

        def wait() -> Tensor:
            if packed.is_cuda:
                there.wait()
            else:
                there.synchronize()
            return packed

        return wait

    def _prepare_thread(self) -> None:
        torch.set_grad_enabled(False)
        if self.side is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.side)

    def _side_waits(self) -> None:
        """The thread may use what has been asked for until now."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())

    def _wait_for_side(self) -> None:
        """What the thread has done may be used."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)


def _for_everybody(pack: Callable[[], Tensor], ranks: int) -> Tensor:
    return pack().repeat(ranks)


def whole_matrices(model: nn.Module) -> dict[str, int]:
    """What Muon needs whole: the matrices of the blocks, and of how many each consists (c_attn: queries, keys and
    values)."""
    return {
        name: 3 if name.endswith("c_attn.weight") else 1
        for name, parameter in model.named_parameters()
        if name.startswith("h.") and parameter.dim() == 2
    }


def _round_count(owned: list[list[Segment]]) -> int:
    longest = max(sum(map(len, stream)) for stream in owned)
    return max(FEWEST_ROUNDS, math.ceil((len(owned) - 1) * longest * 4 / ROUND_BYTES))
