"""Number formats for what goes over the wire: a flat fp32 tensor becomes bytes and comes back.

int8 and int4 follow SDP4Bit (Jia et al., 2024, arXiv 2410.15526): a Hadamard transform spreads an outlier over its
group, so that one scale serves all of it. A block of 128 elements has one scale, a power of two in the E8M0 format of
the OCP Microscaling specification 1.0. Both transforms are products with a matrix of ±1. That of `decode` adds up
integers, at most 32 · 127 in sum: fp32 holds them, so every order of summation gives the same numbers, and so do the
narrow products of GPUs (TF32 has 11 bits, a code at most 7). Codes and scale thus give the same fp32 numbers on every
device, and `weights + decode(…)` rounds once, equally everywhere. `encode` rounds sums of fp32 numbers, of TF32's where
these are allowed, as its device does: its bytes may differ in a last bit from another device's, and nobody needs them
to be equal, as all ranks decode the same ones.

A block:  x (128) = 32 rows of 4;  h = H x, H the 32 x 32 Hadamard matrix of ±1 (Sylvester's order), along the rows;
          code = round(h / 2^e), at most `levels`, e the least with |h| < edge · 2^e;
          decoded: H code · 2^(e - 5), as H H = 32.
In a buffer all codes come before all scales; the last block is filled up with zeros. In between, first rows of all
blocks come first, then all second rows, and so on: (32, 4 · blocks), which one matrix product transforms.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

BLOCK = 128  # elements that share a scale
GROUP = 32  # elements that a transform mixes
COLUMNS = BLOCK // GROUP  # of a block, which is transformed along its rows
# What a transposition moves as one: COLUMNS fp32 numbers, and COLUMNS bytes of codes
ROW, BYTES = torch.complex128, torch.int32
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
    an element that is not finite: it gets the scale NOT_FINITE. The error of an element is at most
    (edge - levels) · 2^e, where 2^e <= 2 max|h| / edge in its block: an average of 32 errors of that size.
    """
    if format_ in FLOATS:
        return values.to(FLOATS[format_], copy=True).view(torch.uint8)
    if len(values) % BLOCK:
        values = torch.nn.functional.pad(values, (0, -len(values) % BLOCK))
    rows = _transposed(_aligned(values), ROW, (-1, GROUP)).view(GROUP, -1)
    codes, scales = _quantise(rows, QUANTISED[format_])
    if format_ == "int4":
        low, high = torch.split(codes, GROUP // 2)
        codes = low.bitwise_and_(15).bitwise_or_(high.bitwise_left_shift_(4))
    packed = _transposed(codes, BYTES, (len(codes), -1))
    return torch.cat([packed.view(torch.uint8), scales])


def decode(buffer: Tensor, format_: str, elements: int) -> Tensor:
    """What `encode` made of `elements` numbers: uint8 (bytes,) to fp32 (elements,), bit-equal on every device.

    A block that was not finite comes back as NaN.
    """
    if format_ in FLOATS:
        return buffer.view(FLOATS[format_]).to(torch.float32, copy=True)
    packed, scales = _parts(buffer, format_, elements)
    rows = GROUP * QUANTISED[format_].bits // 8
    codes = _transposed(_aligned(packed), BYTES, (-1, rows)).view(rows, -1)
    if format_ == "int4":
        # int8's arithmetic shift brings the sign of a nibble along.
        codes = torch.cat([(codes << 4).bitwise_right_shift_(4), codes >> 4])
    h = _hadamard(codes.device) @ codes.to(torch.float32)
    blocks = _transposed(h, ROW, (GROUP, -1)).view(-1, BLOCK)
    return blocks.mul_(_factors(scales)[:, None]).view(-1)[:elements]


def _parts(buffer: Tensor, format_: str, elements: int) -> tuple[Tensor, Tensor]:
    """Codes as int8, flat, and scales as uint8 (blocks,); views."""
    blocks = math.ceil(elements / BLOCK)
    assert len(buffer) == bytes_of(format_, elements), f"no {elements} elements in {format_}"
    codes, scales = torch.split(buffer, [len(buffer) - blocks, blocks])
    return codes.view(torch.int8), scales


def _aligned(flat: Tensor) -> Tensor:
    """It, where it may be seen as wider elements; else a copy."""
    return flat.clone() if flat.storage_offset() % COLUMNS or not flat.is_contiguous() else flat


def _transposed(values: Tensor, unit: torch.dtype, shape: tuple[int, int]) -> Tensor:
    """As a matrix of that shape with elements of `unit`, column after column: flat, in the format of `values`."""
    return values.view(-1).view(unit).view(shape).t().reshape(-1).view(values.dtype)


def _quantise(rows: Tensor, kind: Quantised) -> tuple[Tensor, Tensor]:
    """fp32 (GROUP, COLUMNS · blocks) to int8 codes of the same shape and uint8 scales (blocks,)."""
    h = _hadamard(rows.device) @ rows
    # A NaN stays a NaN, and what is not finite reaches all of its group.
    largest = torch.maximum(h.amax(dim=0), -h.amin(dim=0)).view(-1, COLUMNS).amax(dim=1)
    # Bits of positive fp32 numbers are ordered as the numbers are, and 2^23 of them double it.
    exponent = ((largest.view(torch.int32) - kind.edge_bits) >> 23) + 1
    finite = largest < kind.edge * 2.0**LARGEST  # and no NaN; the same as exponent <= LARGEST
    exponent = exponent.clamp_(SMALLEST, LARGEST)
    inverse = ((BIAS - exponent) << 23).view(torch.float32)  # 2^-e
    h.mul_(_of_columns(inverse)).round_().clamp_(-kind.levels, kind.levels)
    # What a device makes of a NaN as an integer is its own affair.
    codes = h.to(torch.int8).mul_(_of_columns(finite))
    return codes, torch.where(finite, exponent + BIAS, NOT_FINITE).to(torch.uint8)


def _of_columns(of_blocks: Tensor) -> Tensor:
    """(blocks,) to (COLUMNS · blocks,)"""
    return of_blocks[:, None].expand(-1, COLUMNS).reshape(-1)


def _factors(scales: Tensor) -> Tensor:
    """uint8 (blocks,) to fp32: 2^(e - STAGES), NaN for a block that was not finite."""
    exponent = scales.to(torch.int32)
    factors = ((exponent - STAGES) << 23).view(torch.float32)
    return torch.where(exponent == NOT_FINITE, torch.nan, factors)


@cache
def _hadamard(device: torch.device) -> Tensor:
    """The matrix (GROUP, GROUP) in fp32, in Sylvester's order: as many times -1 as i & j has bits."""
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(GROUP)] for i in range(GROUP)]
    return torch.tensor(rows, device=device)
