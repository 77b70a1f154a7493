"""The guides' way of starting: torchrun on every node. Here two nodes are two directories on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aura.cluster import dist_env
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from ports import free_port
from services import wait_until
from trainers import TINY


def test_torchrun_on_two_nodes_with_unlike_processors(corpus: Corpus, tmp_path: Path) -> None:
    """They round differently, and still have the same parameters: each update is computed by one of them."""
    port = free_port()
    launchers = []
    for node in (0, 1):
        command = (
            f"-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --node_rank={node} --master_addr=127.0.0.1 "
            f"--master_port={port} -m aura train --backend gloo --use-custom-model --custom-preset gpt2-nano {TINY} "
            f"--corpus {corpus.path} --run-dir {tmp_path}/node{node}/run --log-dir {tmp_path}/runs/node{node}"
        )
        own = {"AURA_NODE": f"node{node}"} | ({"ATEN_CPU_CAPABILITY": "default"} if node else {})
        launchers.append(
            subprocess.Popen(
                [sys.executable, *command.split()], env=os.environ | own | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )
        )  # fmt: skip
    try:
        outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
    for rank, (launcher, output) in enumerate(zip(launchers, outputs, strict=True)):
        assert launcher.returncode == 0, output
        line = re.escape(f"[Rank {rank}/2 | Node node{rank} | Device cpu] Epoch 1 | Step ")
        assert re.findall(rf"^{line}(\d+) \| Loss: .* \| Sync=(\w+)$", output, re.M) == [
            (step, "OK") for step in ("1", "5", "10", "15", "20")
        ]
        assert "Training completed. Gradients synchronised." in output
    files = [tmp_path / f"node{node}/run/checkpoints/checkpoint-step-20" for node in (0, 1)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
    assert list((tmp_path / "runs/node0").glob("events.*"))
    assert not (tmp_path / "runs/node1").exists()


def test_two_ranks_on_one_pc_are_stopped_and_one_of_them_is_killed(corpus: Corpus, tmp_path: Path) -> None:
    """What is typed for several GPUs of one machine; the same line goes on."""
    run_dir = tmp_path / "run"
    line = "-m torch.distributed.run --standalone --nproc-per-node 2 -m aura train --preset gpt2-nano "
    line += f"--corpus {corpus.path} --run-dir {run_dir} {TINY} --steps 1000000 --save-every 1000000 "
    line += "--validate-every 1000000"

    def said(rank: int) -> dict[str, Any]:
        file = run_dir / f"rank-{rank}" / "status.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def launched(after: int) -> subprocess.Popen[str]:
        launcher = subprocess.Popen(
            [sys.executable, *line.split()], env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        trains = lambda: all(said(rank).get("step", 0) > after for rank in (0, 1))  # noqa: E731
        wait_until(lambda: trains() or launcher.poll() is not None, 240, lambda: str(said(0)))
        assert launcher.poll() is None, launcher.communicate()[0]
        return launcher

    first = launched(0)
    first.send_signal(signal.SIGTERM)
    output = first.communicate(timeout=240)[0]
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert saved.name.startswith("interrupt-step-"), output
    assert [said(rank)["state"] for rank in (0, 1)] == ["stopped"] * 2, output

    second = launched(int(saved.name.rpartition("-")[2]))
    os.kill(said(1)["pid"], signal.SIGKILL)
    output = second.communicate(timeout=240)[0]
    assert second.returncode == 1 and "Signal 9 (SIGKILL)" in output, output
    assert not psutil.pid_exists(said(0)["pid"])
    assert "rank 1" in said(0)["message"] or said(0)["state"] == "stopped", said(0)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not exist in WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is no number"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, "MASTER_PORT is not set"),
    ],
)
def test_wrong_variables_are_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        dist_env.dist_env_from_environment()


def test_nccl_without_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    alone = dist_env.DistEnv(0, 0, 1, "", 0, "node0")
    assert dist_env.choose_device(alone, "auto") == (torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError, match="nccl needs a GPU, node0 has none"):
        dist_env.choose_device(alone, "nccl")


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist_env, "DRIVERS", (tmp_path / "absent", tmp_path))
    alone = dist_env.DistEnv(0, 0, 1, "", 0, "node0")
    with pytest.raises(ConfigError, match=r"node0 has an NVIDIA GPU, but torch .* cannot use it"):
        dist_env.choose_device(alone, "auto")
    assert dist_env.choose_device(alone, "gloo")[0].type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert dist_env.choose_device(alone, "auto")[0].type == "cpu"
    # A launch has given it a card, and its PC has started without a driver since.
    monkeypatch.setattr(dist_env, "DRIVERS", (tmp_path / "absent",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0f1e")
    with pytest.raises(ConfigError, match=r"node0 has an NVIDIA GPU, but torch .* cannot use it"):
        dist_env.choose_device(alone, "auto")


def test_compile_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for device, program in (("cuda", "gcc"), ("cpu", "g")):
        with pytest.raises(ConfigError, match="apt install build-essential"):
            dist_env.check_compiler(torch.device(device))
        (tmp_path / {"gcc": "gcc", "g": "g++"}[program]).touch(mode=0o755)
        dist_env.check_compiler(torch.device(device))


def test_compile_auto_says_why_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, card, cpu = resolve("gpt2"), torch.device("cuda", 0), torch.device("cpu")
    capability, triton = (8, 6), None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(dist_env.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(dist_env.importlib.util, "find_spec", lambda _: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert dist_env.why_not_compiled(config, cpu) == "this rank has no GPU"
    assert dist_env.why_not_compiled(config, card).startswith("there is none of cc, gcc, clang: sudo apt")
    (tmp_path / "gcc").touch(mode=0o755)
    assert dist_env.why_not_compiled(config, card).startswith("Python.h is missing")
    (tmp_path / "Python.h").touch()
    assert dist_env.why_not_compiled(config, card) == "this torch comes without Triton"
    triton = object()
    assert dist_env.compiles(config, card)
    capability = (6, 1)
    assert dist_env.why_not_compiled(config, card) == "Triton wants compute capability 7.0"
    # What was asked for is done, whatever the device.
    assert dist_env.compiles(resolve("gpt2", {"compile": True}), cpu)
    assert dist_env.why_not_compiled(resolve("gpt2", {"compile": "False"}), card) == "compile=false"
