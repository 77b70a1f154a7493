"""What it costs to encode and decode an element, eager and compiled: `python benchmarks/codec.py`.

On one thread of the CPU, or on the GPU where there is one. Each figure is the best of several repetitions. It also
compares the bytes and the decoded numbers of the two ways, which have to be equal.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--elements", type=int, default=1 << 20, help="of one tensor (1,048,576: a round of 4 MiB)"
    )
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    values = torch.randn(arguments.elements, device=device)
    table = Table(title=f"Nanoseconds per element, {arguments.elements:,} elements, {device}", box=None)
    for heading in (
        "format",
        "bits per element",
        "encode",
        "decode",
        "encode, compiled",
        "decode, compiled",
        "equal",
    ):
        table.add_column(heading, justify="right" if table.columns else "left")
    fast_encode, fast_decode = (torch.compile(function, dynamic=True) for function in (encode, decode))
    for format_ in FORMATS:
        count = len(values)
        buffer = encode(values, format_)
        decoded = decode(buffer, format_, count)
        equal = torch.equal(fast_encode(values, format_), buffer)
        equal = equal and torch.equal(fast_decode(buffer, format_, count), decoded)
        times = [
            nanoseconds(lambda: encode(values, format_), count, arguments.repeats),  # noqa: B023 - called at once
            nanoseconds(lambda: decode(buffer, format_, count), count, arguments.repeats),  # noqa: B023
            nanoseconds(lambda: fast_encode(values, format_), count, arguments.repeats),  # noqa: B023
            nanoseconds(lambda: fast_decode(buffer, format_, count), count, arguments.repeats),  # noqa: B023
        ]
        bits = 8 * bytes_of(format_, count) / count
        table.add_row(format_, f"{bits:.3f}", *(f"{t:.2f}" for t in times), "yes" if equal else "NO")
    Console().print(table)


if __name__ == "__main__":
    main()
