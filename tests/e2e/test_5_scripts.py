"""Other people's scripts on three nodes: torchrun, accelerate, DeepSpeed; failures are named, mistakes refused."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from lab_cluster import ROOT, Cluster
from test_3_refusals import changed_inventory

SCRIPTS = ROOT / "tests/e2e/scripts"
REDUCE = ("-e", f"script={SCRIPTS}/small/reduce.py")
THREE = ("--limit", "node0,node1,node2")
NODES = ["node0", "node1", "node2"]
WAIT = ("-e", "wait=true")


def said(output: str) -> str:
    return " ".join(output.split())


def result(cluster: Cluster, node: str, run: str, file: str) -> str:
    return cluster.sh(node, f"cat /var/lib/aura/scripts/{run}/code/{file}")


def results(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    return [json.loads(result(cluster, node, run, f"result-{rank}.json")) for rank, node in enumerate(NODES)]


def learnt(told: list[dict[str, Any]]) -> None:
    """All ranks have trained one model together, over gloo."""
    assert {one["world_size"] for one in told} == {3}
    assert {one["backend"] for one in told} == {"gloo"}
    assert len({one["checksum"] for one in told}) == 1
    assert told[0]["last_loss"] < told[0]["first_loss"] - 1


def arguments() -> tuple[str, ...]:
    flags = (
        "--output_dir out --use_cpu --max_steps 60 --learning_rate 1e-2 --logging_steps 10 --save_strategy no"
    )
    return ("-e", f"arguments={flags} --report_to none")


def give_a_compiler(cluster: Cluster) -> None:
    for node in NODES:
        cluster.sh(node, "apt-get install --yes --no-install-recommends g++ python3.11-dev >/dev/null")


def take_the_compiler(cluster: Cluster) -> None:
    for node in NODES:
        cluster.sh(node, "apt-get purge --yes 'g++*' >/dev/null")


@pytest.fixture(autouse=True, scope="module")
def nothing_runs(cluster: Cluster):
    yield
    for node in NODES:
        cluster.sh(node, "systemctl stop aura-script.service || true")


@pytest.mark.more
def test_a_trainer_of_transformers_learns_under_torchrun(cluster: Cluster) -> None:
    script = f"script={SCRIPTS}/trainer_example/train.py"
    output = said(
        cluster.ansible("launch.yml", "-e", script, "-e", "run=counting", *arguments(), *WAIT, *THREE)
    )
    assert "2 files" in output
    assert "learnt to count" in output
    learnt(results(cluster, "counting"))


def test_the_first_rank_to_fail_is_named_and_the_others_are_stopped(cluster: Cluster) -> None:
    options = (*REDUCE, "-e", "run=broken", "-e", "arguments=fail", *WAIT, *THREE)
    output = said(cluster.ansible("launch.yml", *options, expect=None))
    # Where gloo's threads are still at work when Python ends, torch aborts.
    ended = r"(ended with exit status 1|was ended by SIGABRT)"
    assert re.search(rf"Rank 2 on node2 {ended}, the first one to fail\.", output), output
    assert "ValueError: the batch of step 3 is broken" in output
    for node in NODES:
        assert cluster.sh(node, "systemctl is-active aura-script.service || true").strip() != "active"


@pytest.mark.more
def test_a_script_that_runs_is_shown_kept_apart_and_stopped(cluster: Cluster) -> None:
    """Neither a run of the trainer nor another script is started over it; a stop lets it save."""
    words = ("-e", "arguments=wait 2", "-e", "env=WORDS='two words'")
    cluster.ansible("launch.yml", *REDUCE, "-e", "run=patient", *words, *THREE)
    cluster.wait(
        "the ranks have met", lambda: "3 ranks over" in cluster.ansible("playbooks/status.yml", *THREE), 60
    )
    refused = "A script is active on"
    assert refused in said(cluster.refused("launch.yml", *REDUCE, "-e", "arguments=end", *THREE))
    assert refused in said(cluster.refused("launch.yml", "-e", "preset=gpt2-nano", *THREE))
    logs = said(cluster.ansible("playbooks/logs.yml", *THREE))
    assert re.search(r"\[rank 1\] 3 ranks over \S+ two words", logs), logs
    stopped = cluster.ansible("playbooks/stop.yml", *THREE)
    for rank, node in enumerate(NODES):
        assert result(cluster, node, "patient", f"saved-{rank}") == "step 2"
        assert f"{rank}     {node}    stopped" in stopped


def test_after_a_run_of_the_trainer_status_speaks_of_that(cluster: Cluster) -> None:
    assert "reduce.py" in cluster.ansible("playbooks/status.yml", *THREE)
    short = ("-e", "run=after", "-e", "steps=2", *WAIT)
    cluster.ansible("launch.yml", "-e", "preset=gpt2-nano", *short, *THREE)
    assert "reduce.py" not in cluster.ansible("playbooks/status.yml", *THREE)


def test_a_wrong_request_is_refused(cluster: Cluster) -> None:
    refused = said(cluster.refused("launch.yml", *REDUCE, "-e", "launcher=mpirun", *THREE))
    assert "There is no launcher 'mpirun': take one of torchrun, accelerate, deepspeed." in refused


def test_unequal_nodes_are_refused_for_accelerate(cluster: Cluster, tmp_path: Path) -> None:
    two = changed_inventory(tmp_path, "node1: {", "node1: {script_processes: 2, ")
    refused = said(cluster.refused("launch.yml", *REDUCE, "-e", "launcher=accelerate", *THREE, inventory=two))
    assert "these would have node0 1, node1 2, node2 1. Nothing was started." in refused


@pytest.mark.more
def test_unequal_nodes_run_under_torchrun(cluster: Cluster, tmp_path: Path) -> None:
    two = changed_inventory(tmp_path, "node1: {", "node1: {script_processes: 2, ")
    options = (*REDUCE, "-e", "run=unequal", "-e", "arguments=end", *WAIT, *THREE)
    cluster.ansible("launch.yml", *options, inventory=two)
    assert result(cluster, "node2", "unequal", "ended-3") == "4"
    assert result(cluster, "node1", "unequal", "ended-2") == "4"


@pytest.mark.more
def test_a_run_of_the_trainer_is_not_started_over(cluster: Cluster) -> None:
    cluster.ansible("launch.yml", "-e", "preset=gpt2-nano", "-e", "run=before", "-e", "steps=100000", *THREE)
    try:
        assert "A run is active on" in said(cluster.refused("launch.yml", *REDUCE, *THREE))
    finally:
        cluster.ansible("playbooks/stop.yml", *THREE)


@pytest.mark.more
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_a_save_may_take_longer_than_the_launchers_own_thirty_seconds(
    cluster: Cluster, launcher: str
) -> None:
    how = ("-e", f"launcher={launcher}", "-e", "run=slow", "-e", "arguments=wait 40")
    if launcher == "deepspeed":
        take_the_compiler(cluster)
        assert "has no C++ compiler" in said(cluster.refused("launch.yml", *REDUCE, *how, *THREE))
        give_a_compiler(cluster)
    cluster.ansible("launch.yml", *REDUCE, *how, *THREE)
    cluster.wait(
        "the ranks have met", lambda: "3 ranks over" in cluster.ansible("playbooks/status.yml", *THREE), 60
    )
    cluster.ansible("playbooks/stop.yml", *THREE)
    assert result(cluster, "node1", "slow", "saved-1") == "step 2"


@pytest.mark.more
@pytest.mark.parametrize("count", [3, 2])
def test_accelerates_own_test_passes(cluster: Cluster, count: int) -> None:
    """On two nodes all of it but the check of a shared directory; on three without what is for two, four, eight."""
    script, nodes = f"script={SCRIPTS}/accelerate_test/train.py", NODES[:count]
    options = ("-e", "launcher=accelerate", "-e", f"run=own-test-{count}", *WAIT)
    cluster.ansible("launch.yml", "-e", script, *options, "--limit", ",".join(nodes))
    config = cluster.sh(nodes[-1], "cat /etc/aura/script/default_config.yaml")
    lines = (f"machine_rank: {count - 1}", f"num_machines: {count}", f"num_processes: {count}")
    for line in (*lines, "main_process_ip: 198.18.50.20"):
        assert line in config
    journal = cluster.sh("node0", "journalctl --no-pager -o cat -u aura-script")
    assert "Distributed environment: DistributedType.MULTI_CPU" in journal
    assert "Backend: gloo" in journal


@pytest.mark.more
def test_a_trainer_of_transformers_learns_under_accelerate_and_compiled(cluster: Cluster) -> None:
    script = f"script={SCRIPTS}/trainer_example/train.py"
    options = ("-e", "launcher=accelerate", "-e", "dynamo_backend=aot_eager", "-e", "run=compiled")
    cluster.ansible("launch.yml", "-e", script, *options, *arguments(), *WAIT, *THREE)
    told = results(cluster, "compiled")
    learnt(told)
    assert all(one["compiled"] > 0 for one in told)


def wheel(folder: Path, name: str) -> None:
    """A package with one module, as pip would have downloaded it."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


@pytest.mark.more
def test_packages_come_from_a_folder_where_there_is_no_internet(cluster: Cluster, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(SCRIPTS / "small", project)
    script = project / "reduce.py"
    script.write_text(script.read_text().replace("import os\n", "import os\nimport aura_stand_in\n"))
    (project / "requirements.txt").write_text("aura_stand_in\n")
    wheel(project / "wheels", "another")
    run = f"offline-{tmp_path.parent.name}"  # a project of its own
    options = ("-e", f"script={script}", "-e", f"run={run}", "-e", "arguments=end", *WAIT, *THREE)
    refused = said(cluster.refused("launch.yml", *options))
    assert "could not be had" in refused
    assert "put the wheels of all of them" in refused
    wheel(project / "wheels", "aura_stand_in")
    cluster.ansible("launch.yml", *options)
    assert result(cluster, "node1", run, "ended-1") == "3"


@pytest.mark.more
@pytest.mark.timeout(1500)
def test_deepspeed_with_zero_1_on_processors(cluster: Cluster) -> None:
    """DeepSpeed compiles an operator for processors on every node, the first time. Who stops it then leaves torch's
    lock behind, for which all after it would wait."""
    built = "/var/lib/aura/scripts/.cache/torch_extensions/py311_cpu/deepspeed_shm_comm"
    cluster.sh("node1", f"runuser -u aura -- sh -c 'mkdir -p {built} && touch {built}/lock'")
    zero = ("-e", f"script={SCRIPTS}/deepspeed_zero/train.py", "-e", "launcher=deepspeed", "-e", "run=zero")
    flags = ("-e", "arguments=--deepspeed --deepspeed_config ds.json")
    give_a_compiler(cluster)
    cluster.ansible("launch.yml", *zero, *flags, *WAIT, *THREE)
    told = [
        json.loads(result(cluster, node, "zero", f"result-{rank}.json")) for rank, node in enumerate(NODES)
    ]
    assert {(one["stage"], one["backend"], one["world_size"], one["local_rank"]) for one in told} == {
        (1, "gloo", 3, 0)
    }
    assert len({one["checksum"] for one in told}) == 1
    # Each rank keeps the optimizer's states of its part only.
    assert all(abs(one["own_part"] - one["parameters"] / 3) < 4 for one in told)
    assert told[0]["last_loss"] < told[0]["first_loss"]
