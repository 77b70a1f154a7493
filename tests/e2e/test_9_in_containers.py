"""runtime=docker: three nodes train in containers over the shaped links, and nothing stays of one that died."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from engine import Engine, home_of_engine
from lab_cluster import RUNS, Cluster
from test_9_outside import EVERY_PORT, answering, host, scanner, stranger  # noqa: F401 - a fixture
from workspace import built_workspace

pytestmark = [pytest.mark.more, pytest.mark.timeout(2400)]  # the first one builds the image

NODES = ["node0", "node1", "node2"]
THREE = ("--limit", "node0,node1,node2")
NANO = ("-e", "preset=gpt2-nano", "-e", "strategy=sharded", *THREE)
DOCKER = ("-e", "runtime=docker")
# The node's own overlay takes no other one: Docker keeps its layers in memory. Where cgroups are those of version 1, a
# lab node may not write to them.
PREPARE = """
for group in $(findmnt --raw --noheadings --output TARGET --types cgroup); do mount -o remount,bind,rw "$group"; done
mkdir -p /var/lib/docker && mount -t tmpfs -o size=5g tmpfs /var/lib/docker
"""
TAKE_AWAY = """
systemctl stop docker.socket docker.service containerd.service || true
apt-get -q -o DPkg::Lock::Timeout=300 purge --yes docker.io containerd >/dev/null || true
umount --recursive /var/lib/docker
"""
ENGINE_DIES = "systemctl kill --kill-who=main --signal=KILL docker.service"
UNIT = "systemctl show --property=MainPID --value aura-train@0"
KILLED = {
    "the unit's program": f"kill -9 $({UNIT})",
    "Docker's client": f"kill -9 $(pgrep --full --parent $({UNIT}) 'docker run')",
    "the container": "docker kill aura-train-0 >/dev/null",
    "the engine": ENGINE_DIES,
    "engine and program": f"{ENGINE_DIES}; kill -9 $({UNIT})",
    "the engine, started again in order": "systemctl restart docker.service",
    "the rank that hangs, by systemd": "systemctl kill --kill-who=main --signal=ABRT aura-train@0",
}


def said(output: str) -> str:
    return " ".join(output.split())


def containers(cluster: Cluster, node: str) -> list[str]:
    return cluster.sh(node, "docker ps --no-trunc --format '{{.ID}}'").split()


def processes(cluster: Cluster, node: str, container: str) -> int:
    counted = (
        f"cat /proc/[0-9]*/cgroup 2>/dev/null | grep {container} | sort | uniq --count | sort -n | tail -1"
    )
    return int((cluster.sh(node, counted).split() or ["0"])[0])


@pytest.fixture(scope="module")
def docker(cluster: Cluster) -> Iterator[Cluster]:
    """Docker on three nodes, and on the controller, where the image is."""
    before = dict(os.environ)
    try:
        for node in NODES:
            cluster.sh(node, PREPARE)
        cluster.ansible("site.yml", "-e", "docker_enabled=true", "--tags", "docker", *THREE)
        with home_of_engine() as home, Engine.running(home) as engine:
            built_workspace(engine, home / "aura")
            names = ("DOCKER_HOST", "DOCKER_CONFIG", "PATH")
            os.environ.update({name: engine.environment[name] for name in names})
            yield cluster
            cluster.ansible("playbooks/stop.yml")
    finally:
        os.environ.clear()
        os.environ.update(before)
        for node in NODES:
            cluster.sh(node, TAKE_AWAY)


def test_a_node_without_docker_and_an_unknown_image_are_refused(docker: Cluster) -> None:
    refused = said(docker.refused("launch.yml", "-e", "preset=gpt2-nano", *DOCKER, "--limit", "node2,node3"))
    assert "node3 cannot train in a container: Docker does not answer there. Nothing was started." in refused
    refused = said(docker.refused("launch.yml", *NANO, *DOCKER, "-e", "image=nobodys"))
    assert "has no image nobodys, and the controller has none to give it" in refused
    assert "There is no runtime podman" in said(docker.refused("launch.yml", *NANO, "-e", "runtime=podman"))
    refused = said(docker.refused("launch.yml", *NANO, "-e", "image=aura-trainer"))
    assert "An image is of use with -e runtime=docker only." in refused


def test_containers_learn_what_processes_learn(docker: Cluster) -> None:
    """The same text, the same steps, the same bits; and what a run was told is forgotten by the next one."""
    settings = (*NANO, "-e", "steps=20", "-e", "wait=true")
    docker.ansible("launch.yml", *settings, *DOCKER, "-e", "run=contained")
    logs = said(docker.ansible("playbooks/logs.yml", *THREE))
    assert "[Rank 1/3 | Node node1 | Device cpu]" in logs
    docker.ansible("launch.yml", *settings, "-e", "run=free")
    contained, free = docker.done("contained", NODES), docker.done("free", NODES)
    assert len({done["parameters_checksum"] for done in contained + free}) == 1
    assert [containers(docker, node) for node in NODES] == [[]] * 3
    # What they wrote belongs to whom it would have belonged to.
    assert docker.sh("node1", f"find {RUNS}/contained ! -user aura") == ""


def test_whatever_is_killed_all_train_again_and_no_orphan_stays(docker: Cluster) -> None:
    long = ("-e", "steps=100000", "-e", "save_every=20")
    docker.ansible("launch.yml", *NANO, *DOCKER, "-e", "run=killed", *long)
    # What the rank says to systemd has come through.
    assert docker.sh("node1", "systemctl show --property=WatchdogUSec --value aura-train@0").strip() == "2min"
    # Whoever reaches the program that talks to Docker is root: the rank's user does not.
    for node in NODES:
        refused = docker.sh(node, f"runuser -u aura -- ls /proc/$({UNIT})/fd 2>&1 || true")
        assert "Permission denied" in refused
        assert "docker" not in docker.sh(node, "id -nG aura; ps -u aura -o supgrp=")
    for what, script in KILLED.items():
        attempt, before = docker.status(NODES)[0]["attempt"], containers(docker, "node1")
        assert len(before) == 1
        assert processes(docker, "node1", before[0]) > 0
        docker.sh("node1", script)
        seconds = docker.wait(what, lambda a=attempt: docker.training(NODES, other_than=a), 240)
        print(f"killed: {what}; all three train again after {seconds:.0f} s")
        after = containers(docker, "node1")
        assert len(after) == 1
        assert after != before
        assert processes(docker, "node1", before[0]) == 0
    # Where it hung is in the journal.
    assert "Fatal Python error: Aborted" in docker.sh("node1", "journalctl --boot --unit=aura-train@0")


def test_without_an_engine_there_is_no_orphan_either(docker: Cluster) -> None:
    attempt, (before,) = docker.status(NODES)[0]["attempt"], containers(docker, "node1")
    try:
        docker.sh(
            "node1",
            f"systemctl mask docker.service && {ENGINE_DIES}; systemctl stop docker.socket docker.service",
        )
        docker.wait("the container has gone", lambda: processes(docker, "node1", before) == 0, 60)
        assert docker.sh("node1", "systemctl is-active docker.service || true").strip() != "active"
    finally:
        docker.sh("node1", "systemctl unmask docker.service && systemctl start docker.socket docker.service")
    docker.wait("all train again", lambda: docker.training(NODES, other_than=attempt), 240)


def test_who_looks_from_outside_sees_what_is_there_without_docker(docker: Cluster) -> None:
    with stranger() as there:
        assert answering(host(*there, *EVERY_PORT, "198.18.50.21")) == {}
    # The controller, as test_9_outside sees it.
    found = answering(host(*EVERY_PORT, "198.18.50.20"))
    assert found == {22: "open", 6006: "closed"}


def test_a_stop_saves_and_the_next_launch_goes_on(docker: Cluster) -> None:
    docker.ansible("playbooks/stop.yml")
    stopped = docker.status(NODES)
    assert {status["state"] for status in stopped} == {"stopped"}
    step = stopped[0]["step"]
    assert f"interrupt-step-{step}" in docker.sh("node2", f"ls {RUNS}/killed/checkpoints")
    assert [containers(docker, node) for node in NODES] == [[]] * 3
    longer = ("-e", f"steps={step + 5}", "-e", "save_every=20", "-e", "wait=true")
    output = docker.ansible("launch.yml", *NANO, *DOCKER, "-e", "run=killed", *longer)
    assert "goes to the nodes that have it not" not in said(output)
    assert [done["step"] for done in docker.done("killed", NODES)] == [step + 5] * 3
