"""One rank for test_process_group.py: joins, all-reduces in a loop, prints what happens, exits as the trainer does.

Its faults: `refuse` (cannot take part), `give-up` (ends alone with 64), `hang` (the main thread stops while computing),
`sleep` (the machine sleeps for a minute), `stops-gathering` (and its store answers), `deaf`, `deaf-while-waiting` and
`deaf-at-end` (the store is silent).
"""

import contextlib
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from aura.cluster import activity as activity_module
from aura.cluster import heartbeats
from aura.cluster import process_group as process_group_module
from aura.cluster import rendezvous_handler as handler_module
from aura.cluster import rendezvous_server as server_module
from aura.cluster.activity import Activity
from aura.cluster.dist_env import DistEnv
from aura.cluster.rendezvous_handler import join
from aura.cluster.rendezvous_store import ProcessGroupBroken, ProcessGroupMismatch, ProcessGroupRefused
from aura.errors import DataError


def say(sentence: str) -> None:
    print(sentence, flush=True)


def end(sentence: str, exit_code: int = 75) -> NoReturn:
    say(f"BROKEN {sentence}")
    os._exit(exit_code)


def sleep_for_a_minute() -> None:
    """As a closed laptop: of the clocks, only CLOCK_BOOTTIME goes on."""
    clock = time.clock_gettime
    time.clock_gettime = lambda which: clock(which) + 60 * (which == time.CLOCK_BOOTTIME)


_nobody = socket.socketpair()


def become_deaf(port: int) -> None:
    """What this process says to the store arrives nowhere, and no answer comes: as when its node loses its address."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.getpeername()[1:2] == (port,):
                os.dup2(_nobody[0].fileno(), descriptor)


def work(
    rank: int,
    world_size: int,
    port: int,
    output: str,
    run: str = "test",
    seconds: float = 60,
    fault: str = "",
    reached_at: int = 0,
    least: float = 30,
) -> None:
    """`least`: seconds before which no step counts as stalled."""
    sys.stdout = open(output, "w")  # noqa: SIM115 - open until the process ends
    torch.set_num_threads(1)
    activity_module.LEAST = least
    process_group_module.LINGER, heartbeats.SILENCE = 60.0, heartbeats.SILENCE_OFF
    if fault == "impatient":
        server_module.LATECOMERS = 2.0
    if fault == "stops-gathering":
        server_module.RendezvousServer.wait = lambda *_: time.sleep(1000)
    handler_module.NOBODY = 5.0
    if fault == "deaf-while-waiting":
        threading.Timer(4, become_deaf, (port,)).start()
    try:
        process_group = join(
            DistEnv(rank, 0, world_size, "127.0.0.1", reached_at or port, f"node{rank}"),
            run,
            timeout=40,
            refusal=DataError("is_empty", path="its corpus") if fault == "refuse" else None,
            report=say,
        )
    except ProcessGroupMismatch as exc:
        say(f"MISMATCH {exc}")
        os._exit(64)
    except ProcessGroupRefused as exc:
        say(f"REFUSED {exc}")
        os._exit(exc.exit_code)
    except ProcessGroupBroken as exc:
        end(str(exc))
    activity = Activity()
    process_group.watch(end, activity)
    say(f"ATTEMPT {process_group.attempt}")
    try:
        timeout = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store=process_group.store, rank=rank, world_size=world_size, timeout=timeout
        )
        deadline = time.monotonic() + seconds
        going_on = torch.ones(1)
        say("WORKS")
        step = 0
        while going_on.item() > 0:
            activity.begin_step(step := step + 1)
            time.sleep(0.05)
            if step == 20 and fault == "hang":
                time.sleep(1000)
            if step == 20 and fault == "sleep":
                sleep_for_a_minute()
            if step == 20 and fault == "deaf":
                become_deaf(port)
            if step == 20 and fault == "give-up":
                process_group.give_up("out of memory", 64)
                process_group.leave()
                os._exit(64)
            going_on = torch.tensor([float(time.monotonic() < deadline)])
            with activity.waiting():
                dist.all_reduce(going_on, op=dist.ReduceOp.MIN)
            activity.end_step()
    except RuntimeError as exc:
        process_group.end(exc)
    if fault == "deaf-at-end":
        become_deaf(port)
    process_group.leave()
    say("LEFT")
    os._exit(0)
