"""PCs that stay away, in a run that goes on: the first one too, for a while, for good, and cut off from the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab_cluster import NODES, Cluster

LONG = ("-e", "preset=gpt2-nano", "-e", "run=away", "-e", "steps=100000", "-e", "save_every=50")
# A start on these nodes, which share two cores; and the grace before it, where a PC is silent and where it answers.
START, GRACE, LONG_GRACE = 60, 8, 60


@pytest.fixture
def run(cluster: Cluster) -> Iterator[str]:
    """The attempt in which all five train."""
    cluster.ansible("launch.yml", *LONG)
    cluster.wait("training", cluster.training, 120)
    yield cluster.status(["node1"])[0]["attempt"]
    cluster.ansible("playbooks/stop.yml")


def without(*nodes: str) -> list[str]:
    return [node for node in NODES if node not in nodes]


def away(cluster: Cluster, nodes: list[str]) -> list[list[int]]:
    return [status["away"] for status in cluster.status(nodes)]


def test_the_first_pc_goes_and_the_others_train_until_it_is_back(cluster: Cluster, run: str) -> None:
    others = without("node0")
    step = cluster.status(["node1"])[0]["step"]
    cluster.lab("power-off", "node0")
    try:
        cluster.wait("without node0", lambda: cluster.training(others, other_than=run), GRACE + START)
        assert away(cluster, others) == [[0]] * 4
        cluster.wait("new steps", lambda: cluster.status(["node1"])[0]["step"] > step, 60)
        said = cluster.ansible("playbooks/status.yml")
        assert "Without rank 0: the others train on" in said
        assert "node0 does not answer" in said
    finally:
        cluster.lab("power-on", "node0")
    cluster.wait("with node0 again", cluster.training, 2 * START)
    assert away(cluster, NODES) == [[]] * 5


@pytest.mark.more
def test_who_is_stopped_alone_leaves_and_joins_again(cluster: Cluster, run: str) -> None:
    others = without("node3")
    cluster.ansible("playbooks/stop.yml", "--limit", "node3")
    seconds = cluster.wait("without node3", lambda: cluster.training(others, other_than=run), START)
    assert away(cluster, others) == [[3]] * 4
    print(f"the others train {seconds:.0f} s after stop.yml")
    cluster.ansible("playbooks/join.yml", "--limit", "node3")
    cluster.wait("with node3 again", cluster.training, START)


@pytest.mark.more
def test_a_run_that_was_stopped_without_a_pc_stays_stopped_when_it_returns(
    cluster: Cluster, run: str
) -> None:
    cluster.lab("power-off", "node4")
    try:
        cluster.wait(
            "without node4", lambda: cluster.training(without("node4"), other_than=run), GRACE + START
        )
        assert "node4 does not answer" in cluster.ansible("playbooks/stop.yml", expect=None)
    finally:
        cluster.lab("power-on", "node4")
    cluster.wait("node4 waits", lambda: cluster.status(["node4"])[0]["state"] == "joining", START)
    cluster.wait(
        "and says why",
        lambda: "más de la mitad" in cluster.sh("node4", "journalctl -o cat -n 30 -u aura-train@0"),
        LONG_GRACE + START,
    )
    assert [status["state"] for status in cluster.status(NODES[:4])] == ["stopped"] * 4


@pytest.mark.more
def test_of_a_cluster_cut_in_two_the_larger_part_trains(cluster: Cluster, run: str) -> None:
    large, small = NODES[:3], NODES[3:]
    cluster.cut_off(small, large)
    try:
        cluster.wait("the larger part", lambda: cluster.training(large, other_than=run), GRACE + START)
        assert away(cluster, large) == [[3, 4]] * 3
        assert {status["state"] for status in cluster.status(small)} == {"joining"}
    finally:
        cluster.mend(small)
    cluster.wait("all again", cluster.training, 2 * START)
