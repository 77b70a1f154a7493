"""What guide 001 types, as it types it, on a real engine: image, training, several machines, all-reduce, monitor."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from workspace import OWNER, Workspace

pytestmark = [pytest.mark.more, pytest.mark.timeout(2400)]  # the first one builds the image

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12355"}
SMALL = "--preset gpt2-nano --batch-size 2 --allow-dataset-oversubscription --steps"


@pytest.fixture(scope="session")
def corpus(workspace: Workspace) -> str:
    workspace(
        "run --rm trainer aura prepare --dataset-path /workspace/words.txt --vocab-size 300 --output Data/words"
    )
    return "Data/words"


def owners(directory: Path) -> set[int]:
    return {path.stat().st_uid for path in [directory, *directory.rglob("*")]}


def both(workspace: Workspace, command: str, variables: list[dict[str, str]]) -> list[str]:
    """The same command on several machines: here on one, which has two of everything but the port."""
    started = [workspace.command(f"run --rm trainer {command}", **MASTER, **each) for each in variables]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(variables), "\n".join(outputs)
    return outputs


def test_compose_builds_it_too(workspace: Workspace) -> None:
    """From the same wheels; what was built by `make image` is not built again where both use the same builder."""
    workspace("build", limit=1500)
    assert workspace("run --rm trainer aura --version") == "aura 0.1.0\n"


def test_wheels_that_do_not_fit_are_not_taken(workspace: Workspace) -> None:
    said = workspace("build", expect=None, limit=900, TORCH="cu999")
    assert "dist/wheelhouse has torch for cpu, wanted is cu999" in said


def test_it_is_the_release_of_a_node_and_compiles(workspace: Workspace) -> None:
    versions = json.loads(workspace("run --rm trainer cat /opt/aura/current/version.json"))
    locked = (workspace.directory / "requirements/node.txt").read_text()
    assert f"tokenizers=={versions['tokenizers']} " in locked
    compiled = "import torch; print(torch.compile(lambda x: x * 2 + 1)(torch.ones(3)))"
    assert "tensor([3., 3., 3.])" in workspace(
        f'run --rm trainer python -c "{compiled}"',
        limit=900,
    )


def test_no_secret_is_in_the_image_or_seen_from_it(workspace: Workspace) -> None:
    find = "find / -xdev -name 'id_ed25519*' -o -xdev -name .env -o -xdev -name 'wheelhouse*' 2>/dev/null"
    alone = workspace.engine.docker(
        "run", "--rm", "--network=host", "aura-trainer", "bash", "-c", f"{find} || true"
    )
    assert alone.stdout == ""
    assert workspace("run --rm trainer ls /workspace/inventory") == ""
    assert (workspace.directory / "inventory/lan/state/id_ed25519").exists()


def test_nvidia_smi_says_what_is_missing_here(workspace: Workspace) -> None:
    """With a card it is the driver's own program, which the toolkit adds: no machine of the tests has one."""
    if Path("/dev/nvidia0").exists():
        assert "Driver Version" in workspace("run --rm trainer nvidia-smi")
    else:
        assert "No NVIDIA card was given to this container." in workspace(
            "run --rm trainer nvidia-smi", expect=69
        )


def test_without_a_corpus_it_is_said_how_to_get_one(workspace: Workspace) -> None:
    line = 'run --rm trainer bash -lc "python train_gpt2_spanish.py --epochs 1 --batch-size 2 --seq-len 128"'
    if not list((workspace.directory / "Data").glob("*/meta.json")):
        assert "There is no corpus in ./Data. Prepare one" in workspace(line, expect=1)


def test_one_machine(workspace: Workspace, corpus: str) -> None:
    line = 'run --rm trainer bash -lc "python train_gpt2_spanish.py --epochs 1 --batch-size 2 --seq-len 128"'
    assert "[Rank 0/1" in workspace(line, limit=600)
    assert list((workspace.directory / "checkpoints/gpt2/checkpoints").glob("checkpoint-step-*"))
    assert owners(workspace.directory / "checkpoints") | owners(workspace.directory / "Data") == {OWNER}


def test_several_machines(workspace: Workspace, corpus: str) -> None:
    run = "--run-dir runs/$NODE_RANK/several"  # one name, two directories: here they have the same disk
    command = f"bash -lc './ddp_launch.sh {SMALL} 4 {run}'"
    outputs = both(
        workspace, command, [{"NNODES": "2", "GPUS_PER_NODE": "1", "NODE_RANK": rank} for rank in ("0", "1")]
    )
    for rank, output in enumerate(outputs):
        assert f"[Rank {rank}/2" in output
        assert "Sync=OK" in output
    ends = [
        json.loads((workspace.directory / f"runs/{rank}/several/done.json").read_text()) for rank in (0, 1)
    ]
    assert ends[0]["parameters_checksum"] == ends[1]["parameters_checksum"]


def test_the_allreduce_test(workspace: Workspace) -> None:
    ranks = [{"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": "0"} for rank in ("0", "1")]
    for output in both(workspace, 'bash -lc "python test_ddp.py --backend auto"', ranks):
        assert "gloo" in output


def test_the_monitor(workspace: Workspace) -> None:
    process = workspace.command('run --rm trainer bash -lc "python monitor.py --interval 1"')
    assert process.stdout
    said = [process.stdout.readline()]
    while said[-1] and "CPU" not in said[-1]:
        said.append(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl+C in a terminal
    process.communicate(timeout=60)
    assert "CPU" in said[-1], said


def test_a_container_that_is_stopped_saves(workspace: Workspace, corpus: str) -> None:
    typed = f"python train_gpt2_spanish.py {SMALL} 4000 --run-dir runs/stop"
    process = workspace.command(f"run --rm --name aura-test-stop trainer bash -lc '{typed}'")
    log = workspace.directory / "runs/stop/training_log.csv"
    deadline = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) > 2):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.5)
    workspace.engine.docker("stop", "--time", "60", "aura-test-stop")
    output = process.communicate(timeout=60)[0]
    saved = list((workspace.directory / "runs/stop/checkpoints").glob("interrupt-step-*"))
    assert saved, output


def test_who_may_not_write_is_told_what_to_type(workspace: Workspace) -> None:
    said = workspace("run --rm trainer true", expect=64, AURA_USER="4321:4321")
    assert (
        f"The container runs as user 4321, who may not write into ./Data: it belongs to user {OWNER}." in said
    )
    assert 'echo "AURA_USER=$(id -u):$(id -g)" >>.env' in said


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "MASTER_ADDR is missing."),
        ({**MASTER, "NNODES": "five"}, "NNODES is five, which is no number."),
        ({**MASTER, "NNODES": "2", "NODE_RANK": "2", "GPUS_PER_NODE": "1"}, "of 2 PCs the last one has 1."),
        ({"MASTER_ADDR": "192.168.300.1"}, "no address and no name that this machine knows"),
    ],
)
def test_a_wrong_variable_is_a_sentence(
    workspace: Workspace, variables: dict[str, str], sentence: str
) -> None:
    assert sentence in workspace('run --rm trainer bash -lc "./ddp_launch.sh"', expect=64, **variables)


def test_nothing_of_the_engine_stays(workspace: Workspace) -> None:
    """Of what compose has started: no container, no network."""
    workspace("down")
    shown = [
        "--filter",
        "label=com.docker.compose.project",
        "--format",
        "{{.Names}} {{.Status}} {{.Command}}",
    ]
    assert workspace.engine.docker("ps", "--all", *shown).stdout == ""
    networks = workspace.engine.docker("network", "ls", "--format", "{{.Name}}").stdout.split()
    assert set(networks) == {"host", "none"}
