"""AdamW (Loshchilov and Hutter, 2019), in the number formats that the configuration asks for.

With everything in fp32 it is torch's own fused kernel. Not torch.optim.AdamW: its first use imports torch._dynamo,
which takes as long as importing torch itself, on every start of every rank. The kernel is the same.

Where parameters or moments are smaller, the same formula is computed in fp32, a piece of a tensor at a time, so that
no large fp32 copy is ever in memory. What bf16 or int8 holds is rounded up or down at random, so that the mean is kept
(stochastic rounding). Rounded to nearest, a change of less than half the distance between two numbers would be lost
at every step: small updates would vanish, and moments would not decay.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

EPSILON = 1e-8
PIECE = (
    1 << 22
)  # elements updated at once: large enough for a GPU, small enough to need no memory to speak of
BLOCK = 256  # elements that share one scale in int8
Number = TypeVar("Number", Tensor, int)
MOMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class Optimizer(Protocol):
    """What the loop and its checkpoints ask of an optimizer."""

    def step(self, lr: float) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name; to overwrite the tensors is to resume."""


class AdamW:
    def __init__(
        self,
        model: nn.Module,
        beta1: float,
        beta2: float,
        weight_decay: float,
        moment_format: str = "fp32",
        seed: int = 0,
        without: Container[str] = (),
    ) -> None:
        """`seed`: of the stochastic rounding; equal on all ranks, or their parameters part. `without`: parameters
        that somebody else changes."""
        named = {name: p for name, p in model.named_parameters() if name not in without}
        self.beta1, self.beta2, self.seed = beta1, beta2, seed
        # Biases and LayerNorms do not decay.
        self.groups = [
            ([name for name, p in named.items() if p.dim() >= 2], weight_decay),
            ([name for name, p in named.items() if p.dim() < 2], 0.0),
        ]
        self.parameters = named
        self.fused = moment_format == "fp32" and all(p.dtype == torch.float32 for p in named.values())
        kind = MOMENT_TYPES[moment_format]
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

    @torch.no_grad()
    def step(self, lr: float) -> None:
        # Read once: the host waits for the GPU there. All parameters have taken the same number of steps.
        count = 0 if self.fused else int(next(iter(self.steps.values())).item()) + 1
        for names, weight_decay in self.groups:
            if self.fused:
                self._step_fused(names, lr, weight_decay)
                continue
            for name in names:
                self._step_in_pieces(name, count, lr, weight_decay)

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
        correction1, correction2 = 1 - self.beta1**count, 1 - self.beta2**count
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        exp_avg, exp_avg_sq = self.exp_avg[name].view(-1), self.exp_avg_sq[name].view(-1)
        for first in range(0, len(flat), PIECE):
            piece = slice(first, first + PIECE)
            blocks = slice(first // BLOCK, math.ceil((first + PIECE) / BLOCK))
            scales = self.scales[name][:, blocks] if self.scales else (None, None)
            g = gradient[piece].float()
            m = _read(exp_avg[piece], scales[0])
            v = _read(exp_avg_sq[piece], scales[1])
            m.lerp_(g, 1 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            _write(exp_avg[piece], scales[0], m, _mix_seed(self.seed, f"{name}.exp_avg", count) + first)
            _write(exp_avg_sq[piece], scales[1], v, _mix_seed(self.seed, f"{name}.exp_avg_sq", count) + first)
            p = flat[piece].float().mul_(1 - lr * weight_decay)
            p.addcdiv_(m, (v / correction2).sqrt_().add_(EPSILON), value=-lr / correction1)
            if parameter.dtype == torch.bfloat16:
                p = round_at_random(p, _mix_seed(self.seed, name, count) + first)
            flat[piece].copy_(p)

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name: <parameter>.exp_avg, .exp_avg_sq, .step, and .scales with int8 moments."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "step": self.steps}
        if self.scales:
            kinds["scales"] = self.scales
        return {
            f"{name}.{kind}": tensors[name] for name in self.parameters for kind, tensors in kinds.items()
        }


def _read(stored: Tensor, scales: Tensor | None) -> Tensor:
    """A moment in fp32, as a new tensor."""
    if scales is None:
        return stored.to(torch.float32, copy=True)
    return expand(stored, scales)


def _write(stored: Tensor, scales: Tensor | None, value: Tensor, seed: int) -> None:
    if scales is None:
        stored.copy_(round_at_random(value, seed) if stored.dtype == torch.bfloat16 else value)
    else:
        compressed, new_scales = compress(value, stored.dtype == torch.int8, seed)
        stored.copy_(compressed)
        scales.copy_(new_scales)


def compress(value: Tensor, signed: bool, seed: int) -> tuple[Tensor, Tensor]:
    """fp32 (n,) to 8 bits (n,) and one fp32 scale for each BLOCK elements, the largest magnitude in it.

    Moments span orders of magnitude, so the steps are fine near zero: signed numbers are stored as cube roots,
    squares as fourth roots. Which of the two neighbours a number becomes is drawn (`seed`) so that the mean of what
    `expand` makes of it is the number. Squares do not become zero: in the denominator that would make the update
    endless.
    """
    blocks = nn.functional.pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    top = 127 if signed else 255
    power = blocks.abs().div_(scales.clamp(min=1e-38)[:, None]).mul_(_power(top, signed))
    code = (power.pow(1 / 3) if signed else power.sqrt().sqrt_()).floor_()
    below = _power(code, signed)
    gap = _power(code + 1, signed).sub_(below)
    chance = power.sub_(below).div_(gap)  # of the upper neighbour
    del below, gap
    code += _noise(chance.numel(), seed, value.device).view_as(chance) < chance
    code = code.copysign_(blocks) if signed else code.maximum(blocks > 0)
    code = code.to(torch.int8 if signed else torch.uint8)
    return code.view(-1)[: len(value)], scales


def expand(code: Tensor, scales: Tensor) -> Tensor:
    """What `compress` made, in fp32."""
    signed = code.dtype == torch.int8
    blocks = nn.functional.pad(code, (0, -len(code) % BLOCK)).view(-1, BLOCK).float()
    top = 127 if signed else 255
    return _power(blocks.div_(top), signed).mul_(scales[:, None]).view(-1)[: len(code)]


def _power(x: Number, signed: bool) -> Number:
    square = x * x
    return square * x if signed else square * square


def round_at_random(value: Tensor, seed: int) -> Tensor:
    """fp32 (n,) to numbers that bf16 holds exactly: up or down, with the probability that keeps the mean."""
    noise = _random_bits(len(value), seed, value.device).bitwise_and_(0xFFFF).to(torch.int32)
    return ((value.view(torch.int32) + noise) & -65536).view(torch.float32)


def _noise(count: int, seed: int, device: torch.device) -> Tensor:
    """fp32 (count,), evenly distributed between 0 and 1, both excluded."""
    return _random_bits(count, seed, device).bitwise_right_shift_(9).float().add_(0.5).mul_(2.0**-23)


def _random_bits(count: int, seed: int, device: torch.device) -> Tensor:
    """int64 (count,), 32 random bits each: a hash of (seed, index) in integers.

    Every rank has to draw the same ones, whatever its device: torch's generators depend on the GPU's model.
    """
    x = torch.arange(count, device=device, dtype=torch.int64).add_(seed)
    # Two rounds of xor-shift and multiply; int64 holds the products of 32-bit numbers.
    for _ in range(2):
        x = x.bitwise_xor_(x >> 16).mul_(0x45D9F3B).bitwise_and_(0xFFFFFFFF)
    return x.bitwise_xor_(x >> 16)


def _mix_seed(seed: int, name: str, step: int) -> int:
    """Below 2**32, and far from that of any other tensor or step."""
    value = seed
    for part in (*name.encode(), step):
        value = ((value ^ part) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF  # FNV-1a
    return (value ^ (value >> 32)) & 0xFFFFFFFF
