"""Ranks as processes of this machine: over loopback, or each in the network of one of the lab's nodes.

In the lab a rank has a node's network card and address, and nothing else of it; its link is shaped in both directions.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from aura.cluster.dist_env import keep_freed_memory
from ports import free_port

LAB = str(Path(__file__).parents[1] / "tests/lab/lab")
WHOLE = "1gbit"  # a link that nobody has shaped


@dataclass(frozen=True)
class DistEnv:
    """Where a rank is."""

    card: str
    address: str
    enter: tuple[str, ...] = ()  # the words before a command that is to run there
    mbit: float = 1000  # speed of its link [Mbit/s]


LOOPBACK = DistEnv("lo", "127.0.0.1")


@contextmanager
def places(ranks: int, kbit: int) -> Iterator[list[DistEnv]]:
    """Loopback, or with a rate [kbit/s] the first nodes of the lab, with links of that rate until the end. Ends the
    program with a sentence where there are too few."""
    if not kbit:
        yield [LOOPBACK] * ranks
        return
    nodes = json.loads(subprocess.check_output([LAB, "status", "--json"]))["nodes"]
    nodes = [node for node in nodes if node["kind"] == "container" and node["addresses"]][:ranks]
    if len(nodes) < ranks:
        sys.exit(
            f"{ranks} ranks need {ranks} nodes with an address, and the lab has {len(nodes)}: make lab-up"
        )
    made = []
    try:
        for node in nodes:
            subprocess.check_call([LAB, "rate", node["name"], f"{kbit}kbit"])
            enter = ("nsenter", f"--target={node['pid']}", "--net", "--")
            made.append(DistEnv(node["nic"], node["addresses"][0].split("/")[0], enter, kbit / 1000))
        yield made
    finally:
        for node in nodes:
            subprocess.check_call([LAB, "rate", node["name"], WHOLE])


def run_ranks(where: Sequence[DistEnv], program: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a Python program that runs in every place, with its rank, card and store as the last words. When
    one has failed, the others are ended."""
    store = f"{where[0].address}:{free_port()}"
    processes = [
        subprocess.Popen(
            [*place.enter, sys.executable, *program, str(rank), place.card, store],
            env={**os.environ, **environment, "AURA_LINK_MBIT": str(place.mbit)},
        )
        for rank, place in enumerate(where)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        codes = [process.wait() for process in processes]
    return next((code for code in codes if code > 0), min(codes))


def join(rank: int, ranks: int, card: str, store: str) -> None:
    """This process becomes one of the ranks that talk over gloo, with one thread."""
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = card
    address, port = store.split(":")
    opened = dist.TCPStore(address, int(port), ranks, rank == 0)
    dist.init_process_group("gloo", store=opened, rank=rank, world_size=ranks, timeout=timedelta(minutes=3))


def leave() -> None:
    """Together, and without waiting for the threads of gloo."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def bf16_on_the_wire(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For DistributedDataParallel. torch's own hook for bf16 refuses gloo; this is what it does. torch reads the
    annotations: no strings here."""
    work = dist.all_reduce(bucket.buffer().bfloat16().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))
