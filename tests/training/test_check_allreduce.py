"""`aura check-allreduce` with real processes, by hand and under torchrun."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from aura.check import allreduce
from aura.commands import check_allreduce
from aura.errors import ConfigError
from ports import free_port

# The first before torch is imported, as `aura check-allreduce` does it
COMMON = {"TORCH_CPP_LOG_LEVEL": "FATAL", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


# Imports torch once, then becomes the ranks: [[environment, output file, arguments], ...] -> [exit codes].
RANKS = """
import json, os, sys
import torch.distributed
from aura.commands.cli import main
children = []
for variables, output, arguments in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        os.environ.update(variables)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        os._exit(main(["check-allreduce", *arguments]))
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def start(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=os.environ | COMMON)


def test_real_ranks(tmp_path: Path) -> None:
    """Two good ranks, two of an announced three, and meanwhile two that torchrun starts."""
    torchrun = (
        f"-m torch.distributed.run --nproc-per-node=2 --master-port={free_port()} -m aura check-allreduce"
    )
    run = start([sys.executable, *torchrun.split()])
    ranks: list[Any] = []
    for world_size in (2, 3):
        port = free_port()
        for rank in (0, 1):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": str(port)}
            ranks.append([variables, str(tmp_path / f"{rank} of {world_size}"), ["--timeout=4"]])
    out, error = start([sys.executable, "-c", RANKS]).communicate(json.dumps(ranks), timeout=90)
    assert json.loads(out) == [0, 0, 1, 1], error
    for rank, line in enumerate(lines_of_two()):
        assert (tmp_path / f"{rank} of 2").read_text() == f"{line}\n"
        assert (tmp_path / f"{rank} of 3").read_text() == "Only 2 of 3 ranks came within 4 s; missing: 2.\n"
    out, error = run.communicate(timeout=90)
    assert (run.returncode, sorted(out.split("\n"))) == (0, ["", *lines_of_two()]), error


def lines_of_two() -> list[str]:
    who = f"Node {socket.gethostname()} | Device cpu"
    return [f"[Rank {rank}/2 | {who}] Backend=gloo | all_reduce = 3 (esperado 3) OK" for rank in (0, 1)]


def set_environment(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One wrong element among a million is enough."""
    set_environment(monkeypatch, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())

    def spoil(tensor: Any) -> None:
        tensor[777_777] += 1

    monkeypatch.setattr(dist, "all_reduce", spoil)
    with pytest.raises(allreduce.CheckFailed, match="1 of 1048576 elements are wrong"):
        check_allreduce.main(["--backend=gloo", "--timeout=10"])
    assert capsys.readouterr().out.strip().endswith("all_reduce = 2 (esperado 1) ERROR")
    dist.destroy_process_group()


def test_nobody_at_the_address_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_environment(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    begun = time.monotonic()
    with pytest.raises(allreduce.CheckFailed, match=rf"Rank 0 did not answer at 127.0.0.1:{port} within 1 s"):
        check_allreduce.main(["--timeout=1"])
    assert time.monotonic() - begun < 10


def test_the_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        set_environment(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(allreduce.CheckFailed, match=f"Port {port} is in use"):
            check_allreduce.main(["--timeout=2"])


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "RANK is not set: several ranks need"),
        ({"RANK": 0, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
        ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 1}, "MASTER_ADDR is not set"),
        (
            {"RANK": 2, "WORLD_SIZE": 2, "MASTER_PORT": 1, "MASTER_ADDR": "a"},
            "RANK=2 does not exist in WORLD_SIZE=2",
        ),
    ],
)
def test_wrong_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], says: str) -> None:
    set_environment(monkeypatch, **variables)
    with pytest.raises(ConfigError, match=says):
        check_allreduce.main([])
