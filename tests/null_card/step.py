"""`aura` with the words that follow a number of steps, on the null card: after the last of them one line of JSON says
what the allocator, the compiler and the host have done, and the process ends."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from aura.cluster.ranks import Ranks
from aura.commands.cli import main
from aura.plan.memory import memory_of
from aura.run.progress import Step
from aura.run.trainer import Trainer
from aura.strategy.delayed import Delayed
from aura.strategy.owner_shard import OwnerShard
from aura.strategy.sharded import Sharded
from aura.strategy.streams import Streams
from torch._dynamo.utils import counters

CARD = ctypes.CDLL("libcuda.so.1")
COUNTS = {
    what: ctypes.c_long.in_dll(CARD, f"null_card_{what}")
    for what in ("waits", "waits_of_computing", "copies_to_host")
}


def watch(last: int) -> None:
    commit = Trainer.commit

    def watched(self: Trainer, *arguments: Any) -> Step:
        step = commit(self, *arguments)
        if step.number == last:
            # micro_batch=auto chooses both
            batch, config = (
                self.batches.largest,
                replace(self.config, loss_chunk=self.batches.config.loss_chunk),
            )
            row = {
                "batch": batch,
                "plan": memory_of(config, batch, on_gpu=True, ranks=self.ranks.world_size).tensors,
                "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                **{what: count.value for what, count in COUNTS.items()},
                "graphs": counters["stats"]["unique_graphs"],
                "graph_breaks": sum(counters["graph_break"].values()),
            }
            print(json.dumps(row), flush=True)
            # Who ends first would be missed by the others: all have written theirs.
            self.ranks.total([0.0])
            time.sleep(self.ranks.world_size - 1)
            os._exit(0)
        for count in COUNTS.values():
            count.value = 0
        return step

    Trainer.commit = watched  # type: ignore[method-assign]


def take_no_numbers_of_the_card() -> None:
    """What ranks tell each other of a step decides whether there is one; the card has computed none of it."""

    def silent(ask: Callable[[Any, list[float]], list[list[float]]]) -> Callable[..., list[list[float]]]:
        def said(self: Any, row: list[float]) -> list[list[float]]:
            _, tokens, stop, *others = row
            return ask(self, [0.0, tokens, stop, *[0.0] * len(others)])

        return said

    Sharded._from_all = silent(Sharded._from_all)  # type: ignore[method-assign]
    Ranks.rows = silent(Ranks.rows)  # type: ignore[method-assign]


def hold_updates() -> None:
    """With a delay, an owner's elements before and after the update stand beside the next step's micro-batches for as
    long as they may: from the first one until they are waited for."""
    apply, take_back, send_weights = Delayed.apply, OwnerShard.take_back, Delayed._send_weights
    is_held, is_waited_for = threading.Event(), threading.Event()
    is_waited_for.set()

    def applied(self: Delayed, *arguments: Any) -> Callable[[], Any]:
        is_waited_for.clear()
        is_held.clear()
        wait = apply(self, *arguments)
        assert is_held.wait(20), "no update has come so far"

        def waited() -> Any:
            is_waited_for.set()
            return wait()

        return waited

    def held(self: OwnerShard, before: torch.Tensor) -> None:
        is_held.set()
        assert is_waited_for.wait(20), "nobody waits for the update"
        take_back(self, before)

    def sent(self: Delayed, stream: torch.Tensor) -> None:
        is_held.set()  # with fp32 on the wire there is nothing to be taken back
        send_weights(self, stream)

    Delayed.apply, OwnerShard.take_back, Delayed._send_weights = applied, held, sent  # type: ignore[method-assign]


def mark_threads_of_the_wire() -> None:
    prepare_thread, work = Streams.prepare_thread, Delayed._work

    def prepared(self: Streams, communicator: int) -> None:
        CARD.null_card_this_thread_is_of_the_wire()
        prepare_thread(self, communicator)

    def worked(self: Delayed, *arguments: Any) -> None:
        CARD.null_card_this_thread_is_of_the_wire()
        work(self, *arguments)

    Streams.prepare_thread, Delayed._work = prepared, worked  # type: ignore[method-assign]


take_no_numbers_of_the_card()
hold_updates()
mark_threads_of_the_wire()
watch(int(sys.argv[1]))
sys.argv[1:2] = []
sys.exit(main())
