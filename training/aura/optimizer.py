"""AdamW (Loshchilov and Hutter, 2019), in the number formats that the configuration asks for.

With everything in fp32 it is torch's own fused kernel. Not torch.optim.AdamW: its first use imports torch._dynamo,
which takes as long as importing torch itself, on every start of every rank. The kernel is the same.

Where parameters or moments are smaller, the same formula is computed in fp32, a piece of a tensor at a time, so that
no large fp32 copy is ever in memory. bf16 parameters are rounded up or down at random, in proportion to how near they
are (stochastic rounding): rounded to nearest, updates below 1/256 of a parameter would vanish.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

EPSILON = 1e-8
PIECE = (
    1 << 22
)  # elements updated at once: large enough for a GPU, small enough to need no memory to speak of
BLOCK = 256  # elements that share one scale in int8
MOMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class AdamW:
    def __init__(
        self,
        model: nn.Module,
        beta1: float,
        beta2: float,
        weight_decay: float,
        moment_format: str = "fp32",
        seed: int = 0,
    ) -> None:
        """`seed`: of the stochastic rounding; equal on all ranks, or their parameters part."""
        named = dict(model.named_parameters())
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
        self.param_groups: list[dict[str, Any]] = [{"params": list(named.values())}]  # for GradScaler

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for names, weight_decay in self.groups:
            if self.fused:
                self._step_fused(names, lr, weight_decay)
                continue
            for name in names:
                self._step_in_pieces(name, lr, weight_decay)

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

    def _step_in_pieces(self, name: str, lr: float, weight_decay: float) -> None:
        parameter, steps = self.parameters[name], self.steps[name]
        assert parameter.grad is not None
        steps += 1
        count = int(steps.item())
        correction1, correction2 = 1 - self.beta1**count, 1 - self.beta2**count
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        exp_avg, exp_avg_sq = self.exp_avg[name].view(-1), self.exp_avg_sq[name].view(-1)
        for first in range(0, len(flat), PIECE):
            piece = slice(first, first + PIECE)
            blocks = slice(first // BLOCK, math.ceil((first + PIECE) / BLOCK))
            scales = self.scales[name][:, blocks] if self.scales else None
            g = gradient[piece].float()
            m = _read(exp_avg[piece], scales[0] if scales is not None else None)
            v = _read(exp_avg_sq[piece], scales[1] if scales is not None else None)
            m.lerp_(g, 1 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            _write(exp_avg[piece], scales[0] if scales is not None else None, m)
            _write(exp_avg_sq[piece], scales[1] if scales is not None else None, v)
            p = flat[piece].float().mul_(1 - lr * weight_decay)
            p.addcdiv_(m, (v / correction2).sqrt_().add_(EPSILON), value=-lr / correction1)
            if parameter.dtype == torch.bfloat16:
                p = round_at_random(p, _mix_seed(self.seed, name, count, first))
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


def _write(stored: Tensor, scales: Tensor | None, value: Tensor) -> None:
    if scales is None:
        stored.copy_(value)
    else:
        compressed, new_scales = compress(value, signed=stored.dtype == torch.int8)
        stored.copy_(compressed)
        scales.copy_(new_scales)


def compress(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 (n,) to 8 bits (n,) and one fp32 scale for each BLOCK elements, the largest magnitude in it.

    Moments span orders of magnitude, so the steps are fine near zero: signed numbers are stored as cube roots,
    squares as fourth roots. Squares are rounded up: a zero in the denominator would make the update endless.
    """
    blocks = nn.functional.pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    ratio = blocks / scales.clamp(min=1e-38)[:, None]
    if signed:
        code = (ratio.abs().pow_(1 / 3).mul_(127)).round_().copysign_(ratio).to(torch.int8)
    else:
        code = ratio.sqrt_().sqrt_().mul_(255).ceil_().clamp_(max=255).to(torch.uint8)
    return code.view(-1)[: len(value)], scales


def expand(code: Tensor, scales: Tensor) -> Tensor:
    """What `compress` made, in fp32."""
    signed = code.dtype == torch.int8
    blocks = nn.functional.pad(code, (0, -len(code) % BLOCK)).view(-1, BLOCK).float()
    ratio = (blocks / 127).pow_(3) if signed else (blocks / 255).square_().square_()
    return ratio.mul_(scales[:, None]).view(-1)[: len(code)]


def round_at_random(value: Tensor, seed: int) -> Tensor:
    """fp32 (n,) to numbers that bf16 holds exactly: up or down, with the probability that keeps the mean.

    The 16 random bits are a hash of (seed, index) in integers, since every rank has to draw the same ones, whatever
    its device: torch's generators depend on the GPU's model.
    """
    x = torch.arange(len(value), device=value.device, dtype=torch.int64).add_(seed)
    # Two rounds of xor-shift and multiply; int64 holds the products of 32-bit numbers.
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    noise = ((x ^ (x >> 16)) & 0xFFFF).to(torch.int32)
    return ((value.view(torch.int32) + noise) & -65536).view(torch.float32)


def _mix_seed(seed: int, name: str, step: int, first: int) -> int:
    """Below 2**32, and far from that of any other piece, parameter or step."""
    value = seed
    for part in (*name.encode(), step, first):
        value = ((value ^ part) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF  # FNV-1a
    return (value ^ (value >> 32)) & 0xFFFFFFFF
