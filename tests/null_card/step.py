"""`aura` with the words that follow a number of steps, on the null card: after the last of them one line of JSON says
what the allocator, the compiler and the host have done, and the process ends."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import torch
from aura.commands.cli import main
from aura.plan.memory import largest_micro_batch, memory_of
from aura.run.progress import Step
from aura.run.trainer import Trainer
from torch._dynamo.utils import counters

CARD = ctypes.CDLL("libcuda.so.1")
WAITS, COPIES = (ctypes.c_long.in_dll(CARD, f"null_card_{what}") for what in ("waits", "copies_to_host"))


def watch(last: int) -> None:
    commit = Trainer.commit

    def watched(self: Trainer, *arguments: Any) -> Step:
        step = commit(self, *arguments)
        if step.number == last:
            batch = largest_micro_batch(self.config)
            row = {
                "batch": batch,
                "plan": memory_of(self.config, batch, on_gpu=True).tensors,
                "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "waits": WAITS.value,
                "copies_to_host": COPIES.value,
                "graphs": counters["stats"]["unique_graphs"],
                "graph_breaks": sum(counters["graph_break"].values()),
            }
            print(json.dumps(row), flush=True)
            os._exit(0)
        WAITS.value = COPIES.value = 0
        return step

    Trainer.commit = watched  # type: ignore[method-assign]


watch(int(sys.argv[1]))
sys.argv[1:2] = []
sys.exit(main())
