"""AdamW (Loshchilov and Hutter, 2019), in the number formats that the configuration asks for.

With everything in fp32 it is torch's own fused kernel. Not torch.optim.AdamW: its first use imports torch._dynamo,
which takes as long as importing torch itself, on every start of every rank. The kernel is the same.

Where parameters or moments are smaller, the same formula is computed in fp32: by torch.compile in one pass over a
tensor, where it is used; else operation by operation, a piece of a tensor at a time, so that no large fp32 copy is ever
in memory. What bf16 or int8 holds is rounded up or down at random, so that the mean is kept
(stochastic rounding). Rounded to nearest, a change of less than half the distance between two numbers would be lost
at every step: small updates would vanish, and moments would not decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from aura.cluster.dist_env import compiles
from aura.config import TrainConfig
from aura.optim.groups import Group, group_of

EPSILON = 1e-8
# Elements updated at once: large enough for a GPU, small enough to need no memory to speak of
PIECE = 1 << 22
BLOCK = 256  # elements that share one scale in int8
Number = TypeVar("Number", Tensor, int)
MOMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class Optimizer(Protocol):
    """What the loop and its checkpoints ask of an optimizer."""

    def step(self, lr: float) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name; to overwrite the tensors is to resume."""


class AdamW:
    def __init__(self, model: nn.Module, config: TrainConfig, without: Container[str] = ()) -> None:
        """`without`: parameters that somebody else changes."""
        named = {name: p for name, p in model.named_parameters() if name not in without}
        self.beta1, self.beta2 = config.beta1, config.beta2
        self.seed = config.seed  # of the stochastic rounding; equal on all ranks, or their parameters part
        self.groups: dict[Group, list[str]] = {}
        for name, p in named.items():
            self.groups.setdefault(group_of(name, p, config), []).append(name)
        self.parameters = named
        self.fused = config.moment_format == "fp32" and all(p.dtype == torch.float32 for p in named.values())
        kind = MOMENT_TYPES[config.moment_format]
        self.exp_avg = {name: torch.zeros_like(p.data, dtype=kind) for name, p in named.items()}
        # int8 holds the square roots' companded magnitudes, which are never negative, in all 8 bits.
        second = torch.uint8 if kind == torch.int8 else kind
        self.exp_avg_sq = {name: torch.zeros_like(p.data, dtype=second) for name, p in named.items()}
        self.scales: dict[str, Tensor] = {}  # (2, blocks) of each parameter: of exp_avg and of exp_avg_sq
        if kind == torch.int8:
            self.scales = {
                name: torch.zeros(2, math.ceil(p.numel() / BLOCK), device=p.device)
                for name, p in named.items()
            }
        self.steps = {name: torch.zeros((), device=p.device) for name, p in named.items()}
        self.count: int | None = None  # steps so far, where the host knows it
        self.compiled: Callable[..., None] | None = None
        device = next((p.device for p in named.values()), torch.device("cpu"))
        if not self.fused and compiles(config, device):
            # For any number of blocks: to compile for the length of each parameter would take minutes.
            self.compiled = torch.compile(_update, dynamic=True)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self.fused:
            for group, names in self.groups.items():
                self._step_fused(names, lr * group.rate, group.weight_decay)
            return
        if self.count is None:
            # The host waits for the GPU there, so once is enough. All parameters have taken the same number of steps.
            self.count = int(next(iter(self.steps.values())).item())
        self.count += 1
        if self.compiled:
            self._step_compiled(self.compiled, self.count, lr)
            return
        for group, names in self.groups.items():
            for name in names:
                self._step_in_pieces(name, self.count, lr * group.rate, group.weight_decay)

    def _step_fused(self, names: list[str], lr: float, weight_decay: float) -> None:
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [self.exp_avg[name] for name in names],
            [self.exp_avg_sq[name] for name in names],
            [],
            [self.steps[name] for name in names],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=EPSILON,
        )

    def _step_in_pieces(self, name: str, count: int, lr: float, weight_decay: float) -> None:
        """`count`: the number of this step, from 1."""
        parameter = self.parameters[name]
        assert parameter.grad is not None
        self.steps[name].fill_(count)
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        exp_avg, exp_avg_sq = self.exp_avg[name].view(-1), self.exp_avg_sq[name].view(-1)
        seeds, numbers = self._seeds(name, count), self._numbers(count, lr, weight_decay)
        for first in range(0, len(flat), PIECE):
            piece = slice(first, first + PIECE)
            blocks = slice(first // BLOCK, math.ceil((first + PIECE) / BLOCK))
            scales = self.scales[name][:, blocks] if self.scales else None
            tensors = (flat[piece], gradient[piece], exp_avg[piece], exp_avg_sq[piece], scales)
            _update(*tensors, numbers, [seed + first for seed in seeds], self.beta1, self.beta2)

    def _step_compiled(self, update: Callable[..., None], count: int, lr: float) -> None:
        """What changes from step to step are tensors there: anything else would be compiled again."""
        groups = list(self.groups)
        names = [(name, group) for group, names in self.groups.items() for name in names]
        device = next(iter(self.parameters.values())).device
        seeds = _soon(torch.tensor([self._seeds(name, count) for name, _ in names]), device)
        of_groups = [self._numbers(count, lr * group.rate, group.weight_decay) for group in groups]
        numbers = _soon(torch.tensor(of_groups), device)
        for (name, group), seeds_of in zip(names, seeds, strict=True):
            parameter = self.parameters[name]
            if parameter.numel() % BLOCK:  # small ones; the rows of blocks let everything be one pass
                self._step_in_pieces(name, count, lr * group.rate, group.weight_decay)
                continue
            assert parameter.grad is not None
            self.steps[name].fill_(count)
            tensors = (parameter.data, parameter.grad, self.exp_avg[name], self.exp_avg_sq[name])
            blocks, scales = [tensor.view(-1, BLOCK) for tensor in tensors], self.scales.get(name)
            update(*blocks, scales, numbers[groups.index(group)], seeds_of, self.beta1, self.beta2)

    def _seeds(self, name: str, count: int) -> list[int]:
        """Of the rounding of both moments, and of the parameter."""
        return [mix_seed(self.seed, text, count) for text in (f"{name}.exp_avg", f"{name}.exp_avg_sq", name)]

    def _numbers(self, count: int, lr: float, weight_decay: float) -> list[float]:
        """What the parameter is multiplied with, the length of the step, and the correction of the squares."""
        return [1 - lr * weight_decay, -lr / (1 - self.beta1**count), 1 - self.beta2**count]

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name: <parameter>.exp_avg, .exp_avg_sq, .step, and .scales with int8 moments."""
        self.count = None  # whoever asks may overwrite it
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "step": self.steps}
        if self.scales:
            kinds["scales"] = self.scales
        return {
            f"{name}.{kind}": tensors[name] for name in self.parameters for kind, tensors in kinds.items()
        }


def _update(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scales: Tensor | None,
    numbers: Sequence[float] | Tensor,
    seeds: Sequence[int] | Tensor,
    beta1: float,
    beta2: float,
) -> None:
    """One step of tensors (n,) or (blocks, BLOCK), in place. scales (2, blocks): of int8 moments. For the numbers and
    the seeds see AdamW."""
    shrink, length, correction2 = numbers
    of_m, of_v = (None, None) if scales is None else (scales[0], scales[1])
    g = gradient.float()
    m, v = _read(exp_avg, of_m), _read(exp_avg_sq, of_v)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    _write(exp_avg, of_m, m, seeds[0])
    _write(exp_avg_sq, of_v, v, seeds[1])
    p = parameter.float().mul_(shrink)
    p.add_(m.div_(v.div_(correction2).sqrt_().add_(EPSILON)).mul_(length))
    parameter.copy_(round_at_random(p, seeds[2]) if parameter.dtype == torch.bfloat16 else p)


def _soon(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _read(stored: Tensor, scales: Tensor | None) -> Tensor:
    """A moment in fp32, as a new tensor."""
    if scales is None:
        return stored.to(torch.float32, copy=True)
    return expand(stored, scales)


def _write(stored: Tensor, scales: Tensor | None, value: Tensor, seed: int | Tensor) -> None:
    if scales is None:
        stored.copy_(round_at_random(value, seed) if stored.dtype == torch.bfloat16 else value)
    else:
        compressed, new_scales = compress(value, stored.dtype == torch.int8, seed)
        stored.copy_(compressed)
        scales.copy_(new_scales)


def compress(value: Tensor, signed: bool, seed: int | Tensor) -> tuple[Tensor, Tensor]:
    """fp32 to 8 bits, (n,) or (blocks, BLOCK), and one fp32 scale for each block, the largest magnitude in it.

    Moments span orders of magnitude, so the steps are fine near zero: signed numbers are stored as cube roots,
    squares as fourth roots. Which of the two neighbours a number becomes is drawn (`seed`) so that the mean of what
    `expand` makes of it is the number. Squares do not become zero: in the denominator that would make the update
    endless.
    """
    blocks = _blocks(value)
    scales = blocks.abs().amax(dim=1)
    top = 127 if signed else 255
    power = blocks.abs().div_(scales.clamp(min=1e-38)[:, None]).mul_(_power(top, signed))
    code = (power.pow(1 / 3) if signed else power.sqrt().sqrt_()).floor_()
    below = _power(code, signed)
    gap = _power(code + 1, signed).sub_(below)
    chance = power.sub_(below).div_(gap)  # of the upper neighbour
    del below, gap
    code += _noise(chance, seed) < chance
    code = code.copysign_(blocks) if signed else code.maximum(blocks > 0)
    code = code.to(torch.int8 if signed else torch.uint8)
    return _unblocked(code, value), scales


def expand(code: Tensor, scales: Tensor) -> Tensor:
    """What `compress` made, in fp32."""
    signed = code.dtype == torch.int8
    blocks = _blocks(code).float()
    top = 127 if signed else 255
    return _unblocked(_power(blocks.div_(top), signed).mul_(scales[:, None]), code)


def _blocks(tensor: Tensor) -> Tensor:
    """(blocks, BLOCK)"""
    if tensor.dim() == 2:
        return tensor
    return nn.functional.pad(tensor, (0, -len(tensor) % BLOCK)).view(-1, BLOCK)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks if like.dim() == 2 else blocks.view(-1)[: len(like)]


def _power(x: Number, signed: bool) -> Number:
    square = x * x
    return square * x if signed else square * square


def round_at_random(value: Tensor, seed: int | Tensor) -> Tensor:
    """fp32 to numbers that bf16 holds exactly: up or down, with the probability that keeps the mean.

    What is not finite stays so: to a card's NaN, all ones, no bit can be added without its becoming -0.
    """
    noise = _random_bits(value, seed).bitwise_and_(0xFFFF).to(torch.int32)
    rounded = ((value.view(torch.int32) + noise) & -65536).view(torch.float32)
    return rounded.where(value.isfinite(), value)


def _noise(like: Tensor, seed: int | Tensor) -> Tensor:
    """fp32, evenly distributed between 0 and 1, both excluded."""
    return _random_bits(like, seed).bitwise_right_shift_(9).float().add_(0.5).mul_(2.0**-23)


def _random_bits(like: Tensor, seed: int | Tensor) -> Tensor:
    """int64 in the shape of `like`, 32 random bits each: a hash of (seed, index) in integers.

    Every rank has to draw the same ones, whatever its device: torch's generators depend on the GPU's model.
    """
    x = torch.arange(like.numel(), device=like.device, dtype=torch.int64).view(like.shape).add_(seed)
    # Two rounds of xor-shift and multiply; int64 holds the products of 32-bit numbers.
    for _ in range(2):
        x = x.bitwise_xor_(x >> 16).mul_(0x45D9F3B).bitwise_and_(0xFFFFFFFF)
    return x.bitwise_xor_(x >> 16)


def mix_seed(seed: int, name: str, step: int) -> int:
    """Below 2**32, and far from that of any other tensor or step."""
    value = _fnv(_seed_of(seed, name), step)
    return (value ^ (value >> 32)) & 0xFFFFFFFF


@lru_cache(maxsize=4096)  # GradientSum asks with another seed in every step
def _seed_of(seed: int, name: str) -> int:
    value = seed
    for byte in name.encode():
        value = _fnv(value, byte)
    return value


def _fnv(value: int, part: int) -> int:
    return ((value ^ part) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF  # FNV-1a
