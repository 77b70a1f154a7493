"""How often the host waits for the device in a step: once, for the numbers that are printed.

Without a GPU a wait cannot be seen, so that every operation that would be one is counted.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aura.corpus.corpus import Corpus
from aura.corpus.sequences import Order, Sequences
from aura.run.batches import Batches
from aura.strategy.alone import Alone
from torch import Tensor
from trainers import Fault, after_each_step, complete, start

# What gives the host a number, or the host's memory a tensor.
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__")
QUIET = "--log-every 100 --validate-every 100 --save-every 100 --steps 8"


def count(file: Path) -> Fault:
    """Writes down how many reads each step had, from its first forward pass to the end of its observers."""

    def apply_update() -> None:
        reads: list[str] = []

        def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Tensor, *arguments: Any) -> Any:
                # The thread of the wire waits for what it sends; nobody waits for it there.
                if threading.current_thread() is threading.main_thread():
                    reads.append(name)
                return original(tensor, *arguments)

            return read

        for name in READS:
            setattr(Tensor, name, counted(name, getattr(Tensor, name)))

        def note() -> None:
            with file.open("a") as lines:
                lines.write(json.dumps(reads) + "\n")
            reads.clear()

        after_each_step(note)()

    return apply_update


def steps(file: Path) -> list[list[str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ""),
        (1, "--gradient-accumulation-steps 3 --precision fp16"),
        (1, "--precision bf16 --parameter-format bf16 --moment-format int8 --gradient-accumulation-steps 2"),
        (1, "--optimizer muon"),
        (2, ""),
        (2, "--precision bf16 --wire bf16 --moment-format bf16 --gradient-accumulation-steps 2"),
    ],
)
def test_the_host_reads_once_in_a_step(ranks: int, settings: str, corpus: Corpus, tmp_path: Path) -> None:
    files = {rank: tmp_path / f"reads-{rank}" for rank in range(ranks)}
    faults = {rank: count(file) for rank, file in files.items()}
    complete(start(tmp_path / "run", corpus, ranks, f"{QUIET} {settings}", faults))
    for file in files.values():
        # The first steps also read what is there at the start, and print.
        assert [len(reads) for reads in steps(file)[3:]] == [1] * 5, steps(file)[3:]


def test_the_next_windows_are_read_before_the_numbers_are_waited_for(corpus: Corpus, tmp_path: Path) -> None:
    """By then the device computes; after that it would have nothing to do meanwhile."""
    file = tmp_path / "order"

    def apply_update() -> None:
        batch, of_step, apply = Sequences.batch, Batches.of_step, Alone.apply

        def note(text: str) -> None:
            with file.open("a") as lines:
                lines.write(text + "\n")

        def read(self: Sequences, indices: Any) -> Tensor:
            note(f"read {indices.tolist()}")
            return batch(self, indices)

        def wait(self: Alone, *arguments: Any) -> Any:
            note("wait")
            return apply(self, *arguments)

        def begin(self: Batches, windows_seen: int) -> Any:
            note(f"step behind {windows_seen}")
            return of_step(self, windows_seen)

        Sequences.batch, Batches.of_step, Alone.apply = read, begin, wait  # type: ignore[method-assign]

    settings = f"{QUIET} --gradient-accumulation-steps 3"
    (noted,) = complete(start(tmp_path / "run", corpus, 1, settings, {0: apply_update}))
    lines = file.read_text().splitlines()
    second = lines.index("step behind 6")
    # Two of its three micro-batches are still to be read, behind 8 and 10 sequences; then the next step's first one.
    order = Order(len(Sequences(corpus, "train", 16)), seed=0)
    reads = [f"read {order.at(position, 2).tolist()}" for position in (8, 10, 12)]
    assert lines[second : second + 6] == ["step behind 6", *reads, "wait", "step behind 12"]
    assert noted.done["tokens_seen"] == 8 * 6 * 16


def test_what_is_there_after_the_first_step_is_not_searched_for_garbage(
    corpus: Corpus, tmp_path: Path
) -> None:
    file = tmp_path / "frozen"

    def note() -> None:
        with file.open("a") as lines:
            lines.write(f"{gc.get_freeze_count()}\n")

    complete(start(tmp_path / "run", corpus, 1, QUIET, {0: after_each_step(note)}))
    frozen = [int(line) for line in file.read_text().split()]
    assert frozen[0] == 0 and min(frozen[1:]) > 10_000
