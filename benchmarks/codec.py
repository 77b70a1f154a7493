"""What it costs to encode and decode an element: `python benchmarks/codec.py`.

On one thread of the CPU, or on the GPU where there is one. Each figure is the best of several repetitions. With
--compiled it also compares the bytes and the decoded numbers with those of torch.compile, which have to be equal; on a
CPU it makes both several times as slow (torch 2.13).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from aura.strategy.codec import FORMATS, bytes_of, decode, encode
from rich.console import Console
from rich.table import Table
from torch import Tensor


def nanoseconds(work: Callable[[], Tensor], elements: int, repeats: int) -> float:
    """Of one element, the best of the repetitions."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        done = work()
        if done.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best / elements * 1e9


def timed(
    encode: Callable[..., Tensor], decode: Callable[..., Tensor], values: Tensor, format_: str, repeats: int
) -> tuple[list[str], Tensor]:
    """What each takes, and what comes out."""
    count, buffer = len(values), encode(values, format_)
    times = [
        nanoseconds(lambda: encode(values, format_), count, repeats),
        nanoseconds(lambda: decode(buffer, format_, count), count, repeats),
    ]
    return [f"{time:.2f}" for time in times], decode(buffer, format_, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--elements", type=int, default=1 << 20, help="of one tensor (1,048,576: a round of 4 MiB)"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="also as torch.compile makes them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    values = torch.randn(arguments.elements, device=device)
    table = Table(title=f"Nanoseconds per element, {arguments.elements:,} elements, {device}", box=None)
    compiled = ("encode, compiled", "decode, compiled", "equal") if arguments.compiled else ()
    for heading in ("format", "bits per element", "encode", "decode", *compiled):
        table.add_column(heading, justify="right" if table.columns else "left")
    for format_ in FORMATS:
        count, buffer = len(values), encode(values, format_)
        row, decoded = timed(encode, decode, values, format_, arguments.repeats)
        if arguments.compiled:
            fast_encode, fast_decode = (torch.compile(way, dynamic=True) for way in (encode, decode))
            times, fast_decoded = timed(fast_encode, fast_decode, values, format_, arguments.repeats)
            equal = torch.equal(fast_encode(values, format_), buffer) and torch.equal(fast_decoded, decoded)
            row += [*times, "yes" if equal else "NO"]
        table.add_row(format_, f"{8 * bytes_of(format_, count) / count:.3f}", *row)
    Console().print(table)


if __name__ == "__main__":
    main()
