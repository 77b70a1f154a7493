"""Number formats for what goes over the wire: a flat fp32 tensor becomes bytes and comes back.

int8 and int4 follow SDP4Bit (Jia et al., 2024, arXiv 2410.15526): a Hadamard transform spreads an outlier over its
group, so that one scale serves all of it. A block of 128 elements has one scale, a power of two in the E8M0 format of
the OCP Microscaling specification 1.0. Here the inverse transform adds integers: codes and scale give the same fp32
numbers on every device, and `weights + decode(…)` rounds once, equally everywhere. The forward transform adds in a
fixed order, and after it numbers are scaled by powers of two, so the bytes are equal everywhere too.

A block:  x (128) = 32 rows of 4;  h = H x, H the 32 x 32 Hadamard matrix of ±1 (Sylvester's order), along the rows;
          code = round(h / 2^e), at most `levels`, e the least with |h| < edge · 2^e;
          decoded: H code · 2^(e - 5), as H H = 32.
In a buffer all codes come before all scales; the last block is filled up with zeros.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 128  # elements that share a scale
GROUP = 32  # elements that a transform mixes
STAGES = 5  # log2(GROUP)
BIAS = 127  # of E8M0: the byte is e + BIAS
NOT_FINITE = 255  # E8M0's NaN
# With these exponents neither a decoded number nor a factor leaves the normal numbers of fp32. A block that is smaller
# becomes zeros, a block that is larger is as little use as one that is not finite.
SMALLEST, LARGEST = -120, 118


@dataclass(frozen=True)
class Quantised:
    """A format of integer codes from -levels to levels; `edge`, in scales, is what a scale has to cover."""

    bits: int
    edge: float
    edge_bits: int = field(init=False)  # of its fp32

    def __post_init__(self) -> None:
        object.__setattr__(self, "edge_bits", int.from_bytes(struct.pack("<f", self.edge), "little"))

    @property
    def levels(self) -> int:
        return (1 << self.bits - 1) - 1


# int4 cuts its largest numbers: of Gaussian numbers that leaves a mean square error of 1.7 % of their variance, where
# 7.5, which cuts nothing, leaves 2.6 % (measured; of Student's t with 2.5 degrees of freedom 1.4 and 1.7 %).
QUANTISED = {"int8": Quantised(8, edge=127.5), "int4": Quantised(4, edge=9.5)}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = (*FLOATS, *QUANTISED)


def bytes_of(format_: str, elements: int) -> int:
    """Of an encoded tensor [bytes]: 4 or 2 per element; of int8 and int4 128 or 64 and 1 per block that is begun."""
    if format_ in FLOATS:
        return elements * FLOATS[format_].itemsize
    return math.ceil(elements / BLOCK) * (BLOCK * QUANTISED[format_].bits // 8 + 1)


def encode(values: Tensor, format_: str) -> Tensor:
    """fp32 (n,) to uint8 (bytes_of(format_, n),), on the same device.

    fp32 is exact and bf16 rounded to nearest; both keep what is not finite. int8 and int4 never quantise a block with
    an element that is not finite: it gets the scale NOT_FINITE, see `is_finite`. The error of an element is at most
    (edge - levels) · 2^e, where 2^e <= 2 max|h| / edge in its block: an average of 32 errors of that size.
    """
    if format_ in FLOATS:
        return values.to(FLOATS[format_], copy=True).view(torch.uint8)
    kind = QUANTISED[format_]
    codes, scales = _quantise(_blocks(values), kind)
    if kind.bits == 4:
        low, high = torch.split(codes, BLOCK // 2, dim=1)
        codes = (low & 15) | (high << 4)
    return torch.cat([codes.reshape(-1).view(torch.uint8), scales])


def decode(buffer: Tensor, format_: str, elements: int) -> Tensor:
    """What `encode` made of `elements` numbers: uint8 (bytes,) to fp32 (elements,), bit-equal on every device.

    A block that was not finite comes back as NaN.
    """
    if format_ in FLOATS:
        return buffer.view(FLOATS[format_]).to(torch.float32, copy=True)
    packed, scales = _parts(buffer, format_, elements)
    if format_ == "int4":
        # int8's arithmetic shift brings the sign of a nibble along.
        packed = torch.cat([packed << 4 >> 4, packed >> 4], dim=1)
    return _dequantise(packed, scales).view(-1)[:elements]


def is_finite(buffer: Tensor, format_: str, elements: int) -> Tensor:
    """Whether every encoded number is finite: bool (), on the device."""
    if format_ in FLOATS:
        return buffer.view(FLOATS[format_]).isfinite().all()
    return (_parts(buffer, format_, elements)[1] != NOT_FINITE).all()


def _blocks(values: Tensor) -> Tensor:
    """(blocks, BLOCK)"""
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)


def _parts(buffer: Tensor, format_: str, elements: int) -> tuple[Tensor, Tensor]:
    """Codes as int8 (blocks, bytes of a block) and scales as uint8 (blocks,); views."""
    blocks = math.ceil(elements / BLOCK)
    assert len(buffer) == bytes_of(format_, elements), f"no {elements} elements in {format_}"
    codes, scales = torch.split(buffer, [len(buffer) - blocks, blocks])
    return codes.view(torch.int8).view(blocks, BLOCK * QUANTISED[format_].bits // 8), scales


def _quantise(blocks: Tensor, kind: Quantised) -> tuple[Tensor, Tensor]:
    """fp32 (blocks, BLOCK) to int8 codes of the same shape and uint8 scales (blocks,)."""
    h = _hadamard(blocks)
    largest = h.abs().amax(dim=1)  # a NaN stays a NaN, and what is not finite reaches all of its group
    # Bits of positive fp32 numbers are ordered as the numbers are, and 2^23 of them double it.
    exponent = ((largest.view(torch.int32) - kind.edge_bits) >> 23) + 1
    finite = largest < kind.edge * 2.0**LARGEST  # and no NaN; the same as exponent <= LARGEST
    exponent = exponent.clamp(SMALLEST, LARGEST)
    inverse = ((BIAS - exponent) << 23).view(torch.float32)  # 2^-e
    scaled = (h * inverse[:, None]).round_().clamp_(-kind.levels, kind.levels)
    # Integers of a NaN differ from device to device.
    codes = torch.where(finite[:, None], scaled, 0.0).to(torch.int8)
    return codes, torch.where(finite, exponent + BIAS, NOT_FINITE).to(torch.uint8)


def _dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """int8 (blocks, BLOCK) and uint8 (blocks,) to fp32 (blocks, BLOCK)."""
    exponent = scales.to(torch.int32)
    factor = ((exponent - STAGES) << 23).view(torch.float32)
    factor = torch.where(exponent == NOT_FINITE, torch.nan, factor)
    # At most 32 · 127: int16 holds it, and so does fp32.
    return _hadamard(codes.to(torch.int16)).to(torch.float32) * factor[:, None]


def _hadamard(blocks: Tensor) -> Tensor:
    """H x along the 32 rows of every block, in the format of `blocks`: five times sums and differences of halves."""
    x = blocks
    for stage in range(STAGES):
        pairs = x.view(len(blocks), 1 << stage, 2, BLOCK >> stage + 1)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([upper + lower, upper - lower], dim=2)
    return x.view(len(blocks), BLOCK)
