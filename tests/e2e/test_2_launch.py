"""Launching, stopping, killing and unplugging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from lab_cluster import NODES, ROOT, RUNS, Cluster

NANO = ("-e", "preset=gpt2-nano")
LONG = (*NANO, "-e", "run=long", "-e", "steps=100000", "-e", "save_every=20")


def test_status_and_logs_show_every_rank(cluster: Cluster) -> None:
    status = cluster.ansible("playbooks/status.yml")
    # Ansible folds long lines.
    logs = " ".join(cluster.ansible("playbooks/logs.yml", "-e", "lines=20").split())
    for number, node in enumerate(NODES):
        assert f"{number}/5" in status
        assert f"[Rank {number}/5 | Node {node} | Device cpu]" in logs


def monitored(*options: str) -> str:
    """What `aura monitor --cluster` says once, in English."""
    words = [sys.executable, "-m", "aura", "monitor", "--cluster", "--once", "-i", "inventory/lab", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "training"), "AURA_LANG": "en"}
    return subprocess.check_output(words, cwd=ROOT, env=environment, text=True, timeout=120)


def test_one_table_shows_the_load_and_the_rank_of_every_node(cluster: Cluster) -> None:
    lines = monitored().splitlines()
    assert lines[0].split()[:4] == ["node", "device", "load", "memory"]
    assert [line.split()[0] for line in lines[1:6]] == NODES
    assert all(f" {number}/5 " in line and " done " in line for number, line in enumerate(lines[1:6]))


@pytest.mark.more
def test_stopped_in_the_middle_and_launched_again_gives_the_same_parameters(cluster: Cluster) -> None:
    # Both runs with the same setting: what strategy=auto measures is not the same twice.
    settings = (*NANO, "-e", "strategy=sharded", "-e", "steps=150", "-e", "save_every=1000")
    cluster.ansible("launch.yml", *settings, "-e", "run=straight", "-e", "wait=true")

    cluster.ansible("launch.yml", *settings, "-e", "run=broken")
    cluster.wait("ten steps", lambda: cluster.status()[0].get("step", 0) >= 10, 120)
    cluster.ansible("playbooks/stop.yml")
    stopped = cluster.status()
    assert {status["state"] for status in stopped} == {"stopped"}
    assert len({status["step"] for status in stopped}) == 1
    step = stopped[0]["step"]
    assert 10 <= step < 150
    for node in NODES:
        assert f"interrupt-step-{step}" in cluster.sh(node, f"ls {RUNS}/broken/checkpoints")

    cluster.ansible("launch.yml", *settings, "-e", "run=broken", "-e", "wait=true")
    straight, broken = cluster.done("straight"), cluster.done("broken")
    assert straight[0]["step"] == broken[0]["step"] == 150
    assert {done["parameters_checksum"] for done in straight + broken} == {straight[0]["parameters_checksum"]}


def test_a_dead_pc_is_named_and_the_world_size_follows(cluster: Cluster) -> None:
    cluster.lab("power-off", "node4")
    four = NODES[:4]
    try:
        output = cluster.ansible("launch.yml", *NANO, "-e", "run=four", "-e", "steps=5", "-e", "wait=true")
        seen = monitored("--json")
        status = cluster.ansible("playbooks/status.yml")
        stop = " ".join(cluster.refused("playbooks/stop.yml").split())
    finally:
        cluster.lab("power-on", "node4")
    assert "4 of 5 nodes take part" in output
    assert "node4" in output
    assert "3/4   node3" in status
    assert "node4 does not answer: nobody knows what its ranks do." in status
    assert "When it is back: ansible-playbook playbooks/stop.yml --limit node4" in stop
    assert {rank["world_size"] for rank in cluster.ranks(four)} == {4}
    assert [done["step"] for done in cluster.done("four", four)] == [5] * 4
    nodes = json.loads(seen)
    assert list(nodes) == NODES
    assert "198.18.50.24" in nodes["node4"]  # why there is no answer
    load, ranks, _ = nodes["node0"]
    assert 0 < load["ram_used_bytes"] < load["ram_total_bytes"]
    assert ranks[0]["status"]["step"] == 5


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> Iterator[str]:
    """What the launch of a long run by two nodes says."""
    yield cluster.ansible("launch.yml", *LONG, "--limit", "node1,node2")
    cluster.ansible("playbooks/stop.yml")


def test_limit_says_which_nodes_take_part(cluster: Cluster, two: str) -> None:
    assert "2 of 5 nodes take part: node1, node2" in two
    assert {rank["world_size"] for rank in cluster.ranks(["node1", "node2"])} == {2}


def step_tokens(cluster: Cluster, node: str) -> int:
    return int(json.loads(cluster.sh(node, f"cat {RUNS}/long/model_config.json"))["step_tokens"])


@pytest.fixture(scope="module")
def joined(cluster: Cluster, two: str) -> tuple[int, str]:
    """The step in which two nodes left it, and what the launch of all five says."""
    assert "A run is active on node1" in cluster.refused("launch.yml", *LONG)
    cluster.ansible("playbooks/stop.yml")
    return cluster.status(["node1"])[0]["step"], cluster.ansible("launch.yml", *LONG)


@pytest.fixture(scope="module")
def long_run(joined: tuple[int, str]) -> None:
    """All five nodes are in it."""


def test_three_more_nodes_go_on_with_a_run_and_its_step_stays(
    cluster: Cluster, joined: tuple[int, str]
) -> None:
    step, said = joined
    assert cluster.training() and cluster.status()[0]["step"] > step
    assert {rank["world_size"] for rank in cluster.ranks()} == {5}
    (tokens,) = {step_tokens(cluster, node) for node in NODES}
    assert f"El paso sigue siendo de {tokens:,} tokens" in " ".join(said.split())


MAIN = "systemctl show --property=MainPID --value aura-train@0"
AGE = f"ps -o etimes= --pid $({MAIN}) || echo 0"  # seconds


def kill(*nodes: str):
    def act(cluster: Cluster) -> None:
        for node in nodes:
            cluster.sh(node, "systemctl kill --kill-who=main --signal=KILL aura-train@0.service")

    return act


def power_cycle(cluster: Cluster) -> None:
    cluster.lab("power-off", "node2")
    cluster.lab("power-on", "node2")


@pytest.mark.parametrize(
    ("act", "blamed"),  # in the language of the nodes
    [
        pytest.param(kill("node3"), "rank 3 en node3", id="rank 3 killed", marks=pytest.mark.more),
        pytest.param(kill("node0"), "rank 0 en node0", id="rank 0 killed"),
        pytest.param(kill("node3", "node0"), "", id="rank 0 and rank 3 killed", marks=pytest.mark.more),
        pytest.param(power_cycle, "rank 2 en node2", id="node2 lost power"),
    ],
)
def test_the_gang_recovers_by_itself_in_one_new_attempt(
    cluster: Cluster, long_run: None, act, blamed: str
) -> None:
    # Past a checkpoint, so that there is something to continue from.
    cluster.wait("training", cluster.training, 120)
    first = cluster.status()[0]["step"]
    cluster.wait("a checkpoint", lambda: cluster.status()[0].get("step", 0) >= first + 21, 120)
    cluster.wait("half a minute of this attempt", lambda: int(cluster.sh("node1", AGE)) > 30, 60)
    before = cluster.status()[1]
    since = cluster.sh("node1", "date '+%Y-%m-%d %H:%M:%S'").strip()

    act(cluster)
    seconds = cluster.wait("training again", lambda: cluster.training(other_than=before["attempt"]), 120)
    after = cluster.status()
    with (ROOT / "demo-logs/recovery.log").open("a") as log:  # for docs/benchmarks.md
        log.write(f"{blamed or 'ranks 0 and 3'}: training again {seconds:.0f} s after the fault\n")

    assert len({status["attempt"] for status in after}) == 1
    assert min(status["step"] for status in after) > before["step"] - 20 - 1, (
        "more than one save interval was lost"
    )
    journal = cluster.sh("node1", f"journalctl --no-pager -o cat -u aura-train@0 --since '{since}'")
    assert blamed in journal
    assert "Address already in use" not in journal


def test_a_run_saves_and_goes_on_while_a_node_reboots(cluster: Cluster, long_run: None) -> None:
    cluster.wait("training", cluster.training, 120)
    before = cluster.status()[0]
    booted = "systemctl show --property=InvocationID --value sysinit.target"
    boot, other = cluster.sh("node3", booted), cluster.sh("node2", booted)
    cluster.ansible("playbooks/reboot.yml", "--limit", "node3")
    # It says so only when all train again.
    assert cluster.training(other_than=before["attempt"])
    assert cluster.status()[0]["step"] > before["step"], "what was learnt before the reboot is lost"
    assert cluster.sh("node3", booted) != boot
    assert cluster.sh("node2", booted) == other
