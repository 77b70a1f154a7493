"""What comes out of the codec, how far it is from what went in, and that it is the same everywhere."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from aura.strategy.codec import (
    BLOCK,
    FORMATS,
    GROUP,
    LARGEST,
    NOT_FINITE,
    QUANTISED,
    SMALLEST,
    bytes_of,
    decode,
    encode,
)
from torch import Tensor

LENGTHS = (0, 1, 127, 128, 129, 1000, 5000)
BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


def random(length: int, seed: int = 0) -> Tensor:
    """Gradients have such tails, and sizes that differ by orders of magnitude from one matrix to the next."""
    torch.manual_seed(seed)
    values = torch.distributions.StudentT(3.0).sample((length,))
    return values * torch.exp(torch.linspace(-12, 3, length))


def sylvester() -> Tensor:
    """The Hadamard matrix (GROUP, GROUP) in fp64, from its definition."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def transformed(values: Tensor) -> Tensor:
    """fp64 (blocks, BLOCK): the transform of every block."""
    padded = torch.nn.functional.pad(values.double(), (0, -len(values) % BLOCK))
    return (sylvester() @ padded.view(-1, GROUP, BLOCK // GROUP)).reshape(-1, BLOCK)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_as_many_bytes_as_the_formula_says(format_: str, length: int) -> None:
    values = random(length)
    buffer = encode(values, format_)
    assert buffer.dtype == torch.uint8 and buffer.shape == (bytes_of(format_, length),)
    decoded = decode(buffer, format_, length)
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    assert decoded.isfinite().all()


def test_fp32_is_exact_and_bf16_rounded_to_nearest() -> None:
    values = random(1000)
    assert torch.equal(decode(encode(values, "fp32"), "fp32", 1000), values)
    assert torch.equal(decode(encode(values, "bf16"), "bf16", 1000), values.bfloat16().float())


@pytest.mark.parametrize("format_", QUANTISED)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_the_error_is_as_small_as_the_docstring_says(format_: str, size: float) -> None:
    values = random(5000) * size
    kind = QUANTISED[format_]
    error = (decode(encode(values, format_), format_, 5000).double() - values.double()).abs()
    worst = torch.nn.functional.pad(error, (0, -len(error) % BLOCK)).view(-1, BLOCK).amax(dim=1)
    largest = transformed(values).abs().amax(dim=1)
    assert (worst <= (kind.edge - kind.levels) * 2 * largest / kind.edge * (1 + 1e-6)).all()


@pytest.mark.parametrize("format_", FORMATS)
def test_what_was_decoded_once_stays_as_it_is(format_: str) -> None:
    values = random(5000)
    buffer = encode(values, format_)
    once = decode(buffer, format_, 5000)
    assert torch.equal(decode(encode(once, format_), format_, 5000), once)
    kept = once.clone()  # neither shares memory with what went in
    values.zero_()
    buffer.zero_()
    assert torch.equal(once, kept)
    assert not decode(encode(torch.zeros(300), format_), format_, 300).any()


@pytest.mark.parametrize("format_", QUANTISED)
def test_decoding_is_exact(format_: str) -> None:
    """The sums of the inverse transform are integers, so nothing is rounded, on no device."""
    values = random(20 * BLOCK)
    buffer = encode(values, format_)
    codes = codes_in(buffer, format_)
    scales = buffer[-20:].double() - 127
    exact = (sylvester() @ codes.view(20, GROUP, -1)).view(20, BLOCK) * 2.0 ** (scales - 5)[:, None]
    assert torch.equal(decode(buffer, format_, len(values)).double(), exact.view(-1))


@pytest.mark.parametrize("format_", QUANTISED)
def test_codes_are_what_the_transform_says(format_: str) -> None:
    """Of integers, whose sums fp32 holds: every code is the rounded transform, and a scale is as small as it can be."""
    torch.manual_seed(0)
    kind = QUANTISED[format_]
    values = torch.randint(-2000, 2000, (20 * BLOCK,)).float()
    buffer, h = encode(values, format_), transformed(values)
    exponent = torch.floor(torch.log2(h.abs().amax(dim=1) / kind.edge)) + 1
    assert torch.equal(buffer[-20:].double(), exponent + 127)
    wanted = torch.round(h / 2.0 ** exponent[:, None]).clamp(-kind.levels, kind.levels)
    assert torch.equal(codes_in(buffer, format_), wanted)


def codes_in(buffer: Tensor, format_: str) -> Tensor:
    """fp64 (blocks, BLOCK)"""
    blocks = len(buffer) * 8 // (BLOCK * BITS[format_] + 8)
    packed = buffer[:-blocks].view(blocks, -1).long()
    if format_ == "int8":
        return (packed - 256 * (packed > 127)).double()
    nibbles = torch.cat([packed % 16, packed // 16], dim=1)
    return (nibbles - 16 * (nibbles > 7)).double()


def test_the_same_bytes_on_every_machine() -> None:
    """Who changes them changes what runs of another release understand."""
    index = torch.arange(1000)
    values = (index * 7919 % 1009 - 504).float() * 2.0 ** (index // 100 - 5).float()
    encoded = {format_: bytes(encode(values, format_).tolist()) for format_ in FORMATS}
    assert {format_: hashlib.sha256(content).hexdigest()[:16] for format_, content in encoded.items()} == {
        "fp32": "b063dd8cc22a64c4",
        "bf16": "a363cdc354e19487",
        "int8": "a13042260efdb824",
        "int4": "cad8346b97e05525",
    }


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_flag(format_: str, bad: float) -> None:
    values = random(3 * BLOCK)
    values[BLOCK + 7] = bad
    buffer = encode(values, format_)
    decoded = decode(buffer, format_, len(values))
    if format_ not in QUANTISED:
        assert not decoded[BLOCK + 7].isfinite()
        return
    first, second, third = torch.split(decoded, BLOCK)
    assert second.isnan().all()
    assert first.isfinite().all() and third.isfinite().all()
    assert buffer[-2] == NOT_FINITE
    size = (len(buffer) - 3) // 3
    assert not buffer[size : 2 * size].any(), "codes of a block that was not quantised"


@pytest.mark.parametrize("format_", QUANTISED)
def test_too_large_is_a_flag_and_too_small_is_zero(format_: str) -> None:
    edge = QUANTISED[format_].edge
    for size, finite in ((edge * 2.0**LARGEST / 32 * 0.99, True), (edge * 2.0**LARGEST / 32 * 1.01, False)):
        buffer = encode(torch.full((BLOCK,), size), format_)
        assert decode(buffer, format_, BLOCK).isfinite().all() == finite
    assert not decode(encode(torch.full((BLOCK,), 2.0 ** (SMALLEST - 7)), format_), format_, BLOCK).any()
    largest = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    assert not decode(encode(largest, format_), format_, BLOCK).isfinite().all()


def test_a_buffer_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="no 300 elements in int4"):
        decode(encode(random(200), "int4"), "int4", 300)


@pytest.mark.parametrize("format_", QUANTISED)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_parts_of_a_larger_tensor_too(format_: str, place: int) -> None:
    """Whatever their place: the codec moves several elements as one, which begin at multiples of their size."""
    values = random(1000)
    buffer = encode(values[place : place + 500], format_)
    assert torch.equal(buffer, encode(values[place : place + 500].clone(), format_))
    larger = torch.cat([buffer.new_zeros(place), buffer])
    assert torch.equal(decode(larger[place:], format_, 500), decode(buffer, format_, 500))
