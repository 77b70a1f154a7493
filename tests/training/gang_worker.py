"""One rank for test_gang.py: joins, all-reduces in a loop, prints what happens, exits as the trainer does."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from aura.cluster import gang as gang_module


def say(sentence: str) -> None:
    print(sentence, flush=True)


def end(sentence: str) -> None:
    say(f"BROKEN {sentence}")
    os._exit(75)


def work(rank: int, world_size: int, port: int, run: str, seconds: float, output: str) -> None:
    sys.stdout = open(output, "w")  # noqa: SIM115 - open until the process ends
    torch.set_num_threads(1)
    try:
        gang = gang_module.join(
            rank=rank,
            world_size=world_size,
            master_address="127.0.0.1",
            master_port=port,
            run=run,
            node=f"node{rank}",
            join_timeout=40,
            report=say,
        )
    except gang_module.GangMismatch as exc:
        say(f"MISMATCH {exc}")
        os._exit(64)
    except gang_module.GangBroken as exc:
        end(str(exc))
    gang.watch(end)
    say(f"ATTEMPT {gang.attempt}")
    try:
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", store=gang.store, rank=rank, world_size=world_size, timeout=timeout)
        deadline = time.monotonic() + seconds
        going_on = torch.ones(1)
        say("WORKS")
        while going_on.item() > 0:
            time.sleep(0.05)
            going_on = torch.tensor([float(time.monotonic() < deadline)])
            dist.all_reduce(going_on, op=dist.ReduceOp.MIN)
    except RuntimeError as exc:
        end(gang.explain(exc))
    gang.leave()
    say("LEFT")
    os._exit(0)
