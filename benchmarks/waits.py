"""A GPU and a model that take their time and compute nothing, for the strategies of the trainer to work with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from aura.cluster.activity import Activity
from aura.config import TrainConfig
from aura.model.gpt import GPT
from aura.strategy.codec import QUANTISED, decode, encode
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from wire_arms import Task, lengths, scaled

# Of the work of a micro-batch: a backward pass computes two products where a forward pass has one
FORWARD = 1 / 3
SHORTEST = 2e-4  # seconds; for less nobody goes to sleep
# Bytes that the engine itself moves in a GPU's memory per parameter and step, counted by hand in sharded.py and
# delayed.py: gradients put together (8), added up and their squares (17), differences taken (4), added to the weights
# and to what changes (20), predictions (8).
ENGINE = 57
SAMPLE = 1 << 16  # elements


class Gpu:
    """A clock: work of stated length is done one piece after the other. As with a real one, a processor that comes
    late with more work (here it encodes and decodes itself) delays nothing while there is work enough in the queue;
    only who waits for other ranks makes it wait too."""

    def __init__(self) -> None:
        self.free_at = time.perf_counter()  # all that was queued is done by then
        self.lock = threading.Lock()
        self.micro_batch = 0.0  # seconds of the one that is being computed

    def queue(self, seconds: float) -> None:
        with self.lock:
            self.free_at += seconds

    def work(self, seconds: float) -> None:
        """And wait for it."""
        self.queue(seconds)
        self._wait(self.free_at)

    def work_now(self, seconds: float) -> None:
        """Work on what has just come from other ranks; also in another thread."""
        with self.lock:
            self.free_at = done = max(self.free_at, time.perf_counter()) + seconds
        self._wait(done)

    def nothing_before(self, moment: float) -> None:
        """It had to wait until then [time.perf_counter()]."""
        with self.lock:
            self.free_at = max(self.free_at, moment)

    def _wait(self, moment: float) -> None:
        if (ahead := moment - time.perf_counter()) > SHORTEST:
            time.sleep(ahead)


class Waiting(Activity):
    """Whoever has looked whether something has come from other ranks had nothing for the GPU to do before."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    @contextmanager
    def waiting(self, computes_beside: Callable[[], bool] = lambda: False) -> Iterator[None]:
        with super().waiting(computes_beside):
            yield
        self.gpu.nothing_before(time.perf_counter())


class Layer(nn.Module):
    """Parameters whose gradients were made beforehand."""

    def __init__(self, gpu: Gpu, shapes: Iterable[tuple[str, Tensor]], part: float) -> None:
        """part: of the time of a micro-batch."""
        super().__init__()
        self.gpu, self.part = gpu, part
        for name, like in shapes:
            self.register_parameter(name, nn.Parameter(zeros(like.shape)))
        self.gradients = [zeros(parameter.shape) for parameter in self.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return Pass.apply(x, self, *self.parameters())  # type: ignore[no-untyped-call]


def zeros(shape: torch.Size) -> Tensor:
    """In fp32; they take no memory before somebody writes to them."""
    return torch.from_numpy(numpy.zeros(shape, numpy.float32))


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *_: Tensor) -> Tensor:
        ctx.layer = layer
        layer.gpu.work(FORWARD * layer.part * layer.gpu.micro_batch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer: Layer = ctx.layer
        layer.gpu.work((1 - FORWARD) * layer.part * layer.gpu.micro_batch)
        # A tensor that nobody else has becomes `grad` itself, without a copy.
        return (gradients[0], None, *(gradient.detach() for gradient in layer.gradients))


class Model(nn.Module):
    """GPT-2's parameters in names, shapes and order; a layer takes time in proportion to its elements. The embedding
    takes it as output matrix, before the backward pass of the layers; its gradient is there at the end."""

    def __init__(self, config: TrainConfig, gpu: Gpu) -> None:
        super().__init__()
        for name, child in GPT(config, "meta").named_children():
            self.add_module(name, child)
        shapes = {name: list(module.named_parameters(recurse=False)) for name, module in self.named_modules()}
        sizes = {name: sum(like.numel() for _, like in own) for name, own in shapes.items() if name != "wpe"}
        everything = sum(sizes.values())
        self.layers = []  # no parameters of its own: a list
        for name, own in shapes.items():
            if own:
                part = 0.0 if name in ("wte", "wpe") else sizes[name] / everything
                self.layers.append(Layer(gpu, own, part))
                self.set_submodule(name, self.layers[-1])
        self.output = Layer(gpu, [], sizes["wte"] / everything)
        self.gpu = gpu

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """The same weights for all ranks, and gradients of this one."""
        for number, layer in enumerate(self.layers):
            for parameter, gradient in zip(layer.parameters(), layer.gradients, strict=True):
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(number))
                gradient.normal_(std=1e-3, generator=torch.Generator().manual_seed(1000 * seed + number))

    def forward(self) -> Tensor:
        """A micro-batch layer by layer, with a backward pass that makes gradients."""
        x = torch.zeros((), requires_grad=True)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Way:
    """To train, as one rank: it fills the model and takes steps until its end, when it says whether the parameters of
    all ranks are equal."""

    def __init__(self, task: Task, rank: int) -> None:
        self.arm, self.waits = task.arm, lengths(task.arm, task.mfu)
        self.micro_batches, self.gpu = self.waits.micro_batches[rank], Gpu()
        self.config = scaled(self.arm.config(), task.scale)
        self.model = Model(self.config, self.gpu)


class Update:
    """An optimizer: a wait, and the simplest of updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], gpu: Gpu, seconds: float) -> None:
        self.parameters, self.gpu, self.seconds = list(parameters), gpu, seconds

    def step(self, lr: float) -> None:
        self.gpu.work_now(self.seconds)
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=lr)

    def tensors(self) -> dict[str, Tensor]:
        return {}


def moved_bytes(wire: str, ranks: int) -> float:
    """Of a GPU's memory, per parameter and step: by the codec, as its operators read and write on the CPU, and by the
    engine. A rank encodes all gradients and what it owns of the differences, and decodes as much as that twice."""
    if wire not in QUANTISED:
        return ENGINE
    values = torch.randn(SAMPLE)
    with Traffic() as of_encoding:
        buffer = encode(values, wire)
    with Traffic() as of_decoding:
        decode(buffer, wire, SAMPLE)
    return ENGINE + ((1 + 1 / ranks) * of_encoding.bytes + 2 * of_decoding.bytes) / SAMPLE


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what operators read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        moves = not function.is_view and function is not torch.ops.aten._unsafe_view.default
        if moves:
            lists = [one if isinstance(one, list | tuple) else [one] for one in (*arguments, result)]
            tensors = [one for several in lists for one in several if isinstance(one, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result
