"""Where this process stands: its rank, its node, its device. From the variables that torchrun and systemd set."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import shutil
import socket
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from aura.check.allreduce import number
from aura.config import TrainConfig
from aura.errors import ConfigError
from aura.texts.console import text

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# The first GPU, where the driver is loaded; that of WSL; the driver itself, which a container sees without any GPU too.
DRIVERS = (Path("/dev/nvidia0"), Path("/dev/dxg"), Path("/proc/driver/nvidia/version"))


@dataclass(frozen=True)
class DistEnv:
    rank: int
    local_rank: int  # among the ranks of this node
    world_size: int
    master_address: str  # of rank 0; empty when alone
    master_port: int
    node: str
    # Where ranks may be left out: of every rank its PC's address, in their order, and which launch has put them there.
    peers: tuple[str, ...] = ()
    launch: str = ""

    @property
    def address(self) -> str:
        """Of this rank's PC, as its peers know it; empty where they do not."""
        return self.peers[self.rank] if self.peers else ""


def dist_env_from_environment() -> DistEnv:
    """RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; one process when they are absent. AURA_PEERS (addresses,
    by rank, with commas) and AURA_LAUNCH let a run go on without some.

    AURA_NODE is the node's name where the host name is not. Raises ConfigError.
    """
    environment = os.environ
    node = environment.get("AURA_NODE") or socket.gethostname()
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return DistEnv(0, 0, 1, "", 0, node)

    rank, local_rank, world_size = number("RANK"), number("LOCAL_RANK", "0"), number("WORLD_SIZE")
    if rank >= world_size:
        raise ConfigError("no_such_rank", rank=rank, world_size=world_size)
    peers = tuple(filter(None, environment.get("AURA_PEERS", "").split(",")))
    if peers and len(peers) != world_size:
        raise ConfigError("peers_count", count=len(peers), world_size=world_size)
    launch = environment.get("AURA_LAUNCH", "")
    if world_size == 1:
        return DistEnv(rank, local_rank, 1, "", number("MASTER_PORT") if peers else 0, node, peers, launch)
    if not environment.get("MASTER_ADDR"):
        raise ConfigError("no_master_address")
    return DistEnv(
        rank, local_rank, world_size, environment["MASTER_ADDR"], number("MASTER_PORT"), node, peers, launch
    )


def link_mbit() -> float:
    """Speed of this node's link to the others [Mbit/s]: AURA_LINK_MBIT, else 1000. Raises ConfigError."""
    text = os.environ.get("AURA_LINK_MBIT") or "1000"
    try:
        if 0 < (speed := float(text)) < math.inf:
            return speed
    except ValueError:
        pass
    raise ConfigError("link_speed_wrong", value=text)


def choose_device(dist_env: DistEnv, backend: str) -> tuple[torch.device, str]:
    """The device of this rank, and `backend`; gloo for auto where there is no GPU. Raises ConfigError."""
    if not torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = seen in ("", "-1")
        # A launch that has given this rank a card names it: after a boot without a driver there is no device either.
        has_card = any(map(Path.exists, DRIVERS)) or str(seen).startswith(("GPU-", "MIG-"))
        if backend != "gloo" and has_card and not hidden:
            raise ConfigError("torch_cannot_use_gpu", node=dist_env.node, version=torch.__version__)
        if backend == "nccl":
            raise ConfigError("nccl_needs_gpu", node=dist_env.node)
        return torch.device("cpu"), "gloo"
    if dist_env.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "too_few_gpus", rank=dist_env.local_rank, node=dist_env.node, count=torch.cuda.device_count()
        )
    device = torch.device("cuda", dist_env.local_rank)
    torch.cuda.set_device(device)
    return device, backend


def versions(backend: str) -> dict[str, str]:
    """Of what has to be the same for all ranks, as a Member says it. Of torch, builds for cards and for processors go
    together."""
    usable = backend != "gloo" and dist.is_nccl_available()
    nccl = torch.cuda.nccl.version() if usable else ()  # type: ignore[no-untyped-call]
    return {"torch": torch.__version__.partition("+")[0], "nccl": ".".join(map(str, nccl))}


def keep_freed_memory() -> None:
    """For a rank that computes on the processor. glibc gives freed memory back to the kernel at once, and a step of a
    small model takes what the one before has freed: 1,400 pages, which the kernel fills with zeros each time. Of a rank
    of gpt2-nano that was a seventh of its time."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library
    # Larger blocks come straight from the kernel: glibc's own upper limit, which it approaches by itself.
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)


def check_compiler(device: torch.device) -> None:
    """Raises ConfigError."""
    if programs := _compilers_that_lack(device):
        raise ConfigError("no_compiler", programs=programs)


def _compilers_that_lack(device: torch.device) -> str:
    """torch.compile writes C for a GPU's launches and C++ for the processor. Empty where there is one."""
    variable, programs = (
        ("CC", ("cc", "gcc", "clang")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    )
    there = os.environ.get(variable) or any(map(shutil.which, programs))
    return "" if there else ", ".join(programs)


def why_not_compiled(config: TrainConfig, device: torch.device) -> str:
    """Why torch.compile does not write this rank's kernels; empty where it does. What is compiled on one rank need not
    be on another: sharded ranks may round differently."""
    if config.compile != "auto":
        return "" if config.compile == "true" else "compile=false"
    if device.type != "cuda":
        return text("eager_without_gpu")
    if programs := _compilers_that_lack(device):
        return text("eager_without_compiler", programs=programs)
    # Triton compiles C that includes Python.h, for cards from 2017 (Volta) on.
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return text("eager_without_headers")
    if importlib.util.find_spec("triton") is None:
        return text("eager_without_triton")
    if torch.cuda.get_device_capability(device) < (7, 0):
        return text("eager_on_old_card")
    return ""


def compiles(config: TrainConfig, device: torch.device) -> bool:
    return not why_not_compiled(config, device)
