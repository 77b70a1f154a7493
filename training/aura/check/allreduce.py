"""All ranks add their numbers, and each one checks the sum it got.

Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so it is started like the trainer, by torchrun too.
One time limit holds for everything; whatever goes wrong ends as one sentence that names the rank or the address.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from aura.backend import agreed_backend
from aura.errors import AuraError, ConfigError

ELEMENTS = 1024 * 1024  # float32: 4 MiB, more than one packet, less than a second on 100 Mbit/s
GOODBYE = 2.0  # seconds that rank 0, who holds the store, stays for the others


class CheckFailed(AuraError):
    """The sum was wrong, or could not be made."""


@dataclass(frozen=True)
class Rank:
    """This process, as the environment describes it."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int
    node: str

    def label(self, device: str) -> str:
        return f"[Rank {self.rank}/{self.world_size} | Node {self.node} | Device {device}]"


def number(variable: str, otherwise: str = "") -> int:
    """Of the environment. Raises ConfigError."""
    value = os.environ.get(variable, otherwise)
    if not value:
        raise ConfigError("variable_missing", name=variable)
    if not value.isdecimal():
        raise ConfigError("variable_is_no_number", name=variable, value=value)
    return int(value)


def read_environment() -> Rank:
    me = Rank(
        rank=number("RANK"),
        local_rank=number("LOCAL_RANK", "0"),
        world_size=number("WORLD_SIZE"),
        address=os.environ.get("MASTER_ADDR", ""),
        port=number("MASTER_PORT"),
        node=socket.gethostname(),
    )
    if not me.address:
        raise ConfigError("no_master_address")
    if me.rank >= me.world_size:
        raise ConfigError("no_such_rank", rank=me.rank, world_size=me.world_size)
    return me


class Deadline:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> timedelta:
        return timedelta(seconds=max(0.1, self._end - time.monotonic()))


def open_store(me: Rank, deadline: Deadline) -> Any:
    """The key-value store at rank 0 (under torchrun its agent has one already)."""
    import torch.distributed as dist

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            me.address,
            me.port,
            None,
            is_master=me.rank == 0 and not agent,
            timeout=deadline.left(),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        place = f"{me.address}:{me.port}"
        if "EADDRINUSE" in str(error):
            raise CheckFailed("port_in_use", port=me.port, node=me.node) from error
        if me.rank == 0 and not agent:
            raise CheckFailed("cannot_listen", place=place, error=first_line(error)) from error
        raise CheckFailed("rank_0_silent", place=place, seconds=deadline.seconds) from error
    return dist.PrefixStore(f"check-allreduce/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def meet(me: Rank, store: Any, backend: str, deadline: Deadline) -> str:
    """Waits for every rank. Returns the backend that all of them use, as a training would."""
    import torch.distributed as dist

    if store.add(f"count/{me.rank}", 1) > 1:
        raise CheckFailed("rank_twice", rank=me.rank, node=me.node)
    store.set(
        f"here/{me.rank}", json.dumps({"node": me.node, "backend": backend, "world_size": me.world_size})
    )
    try:
        store.wait([f"here/{rank}" for rank in range(me.world_size)], deadline.left())
        found = [json.loads(store.get(f"here/{rank}")) for rank in range(me.world_size)]
    except dist.DistError as error:
        raise why_not_met(me, store, deadline) from error
    for rank, other in enumerate(found):
        if other["world_size"] != me.world_size:
            theirs = {"rank": rank, "node": other["node"], "size": other["world_size"]}
            mine = {"my_rank": me.rank, "my_node": me.node, "my_size": me.world_size}
            raise CheckFailed("sizes_differ", **theirs, **mine)
    return agreed_backend([other["backend"] for other in found], [other["node"] for other in found])


def why_not_met(me: Rank, store: Any, deadline: Deadline) -> CheckFailed:
    """Who had not come when the time was over."""
    import torch.distributed as dist

    try:
        absent = [rank for rank in range(me.world_size) if not store.check([f"here/{rank}"])]
    except dist.DistError:
        return CheckFailed("rank_0_went")
    finally:
        if me.rank == 0:
            time.sleep(GOODBYE)  # the others ask rank 0's store the same question
    if not absent:
        return CheckFailed("all_came_too_late", ranks=me.world_size, seconds=deadline.seconds)
    came, missing = me.world_size - len(absent), ", ".join(map(str, absent))
    return CheckFailed("some_came", came=came, ranks=me.world_size, seconds=deadline.seconds, missing=missing)


def reduce(me: Rank, store: Any, backend: str, deadline: Deadline, say: Callable[[str], None]) -> None:
    """The all_reduce itself: rank r gives r + 1 in every element, so every element must be n (n + 1) / 2."""
    import torch
    import torch.distributed as dist

    device = torch.device(f"cuda:{me.local_rank}" if backend == "nccl" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend, store=store, rank=me.rank, world_size=me.world_size, timeout=deadline.left()
        )
        tensor = torch.full((ELEMENTS,), float(me.rank + 1), device=device)
        dist.all_reduce(tensor)
        result = tensor.cpu()  # waits for the GPU
    except RuntimeError as error:  # every error of gloo and of NCCL
        label, reason = me.label(str(device)), first_line(error)
        raise CheckFailed("all_reduce_failed", label=label, backend=backend, error=reason) from error
    expected = me.world_size * (me.world_size + 1) // 2
    wrong = result[result != expected]
    shown = f"{result[0].item():g}" if wrong.numel() == 0 else f"{wrong[0].item():g}"
    line = f"{me.label(str(device))} Backend={backend} | all_reduce = {shown} (esperado {expected})"
    if wrong.numel():
        say(f"{line} ERROR")
        count = wrong.numel()
        raise CheckFailed("all_reduce_wrong", count=count, elements=ELEMENTS, node=me.node, backend=backend)
    say(f"{line} OK")
    say_goodbye(me, store)
    dist.destroy_process_group()


def say_goodbye(me: Rank, store: Any) -> None:
    """Rank 0 holds the store: it leaves last."""
    import torch.distributed as dist

    with contextlib.suppress(dist.DistError):  # the sum was right; how somebody left does not change that
        store.set(f"done/{me.rank}", "")
        if me.rank == 0:
            store.wait([f"done/{rank}" for rank in range(me.world_size)], timedelta(seconds=GOODBYE))


def usable_backend(wish: str, local_rank: int) -> str:
    """Its wish where it has a GPU of its own, else gloo."""
    import torch

    has_gpu = wish != "gloo" and torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    return wish if has_gpu else "gloo"


def check(me: Rank, wish: str, deadline: Deadline, say: Callable[[str], None]) -> None:
    """Meet the other ranks and add; `say` hears the sum. Raises CheckFailed."""
    able = usable_backend(wish, me.local_rank)
    store = open_store(me, deadline)
    backend = meet(me, store, able, deadline)
    if wish == "nccl" and backend != "nccl":
        raise CheckFailed("nccl_needs_gpus")
    reduce(me, store, backend, deadline, say)
