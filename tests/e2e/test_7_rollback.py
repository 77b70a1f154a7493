"""A newer trainer comes, is no good, and goes again; nothing brings it back unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lab_cluster import NODES, ROOT, RUNS, Cluster

NANO = ("-e", "preset=gpt2-nano", "-e", "run=rolled", "-e", "save_every=20")
pytestmark = [pytest.mark.more, pytest.mark.timeout(1200)]


@pytest.fixture
def newer(tmp_path: Path) -> tuple[str, str]:
    """Options of site.yml for a trainer that has changed."""
    source = tmp_path / "training"
    shutil.copytree(ROOT / "training", source, ignore=shutil.ignore_patterns("__pycache__"))
    package = source / "aura/__init__.py"
    package.write_text(package.read_text() + "# newer\n")
    return ("-e", f"trainer_source={source}")


def linked(cluster: Cluster, link: str) -> dict[str, str]:
    """What a link names on each node."""
    return {node: cluster.sh(node, f"readlink /opt/aura/{link} || true").strip() for node in NODES}


def step_of(cluster: Cluster) -> int:
    return int(cluster.status()[0].get("step") or 0)


def test_back_to_the_trainer_before(cluster: Cluster, newer: tuple[str, str]) -> None:
    old = linked(cluster, "current")
    assert "has no previous release to go back to" in cluster.refused("playbooks/rollback.yml")

    cluster.ansible("site.yml", *newer)
    new = linked(cluster, "current")
    assert all(new[node] != old[node] for node in NODES)
    assert linked(cluster, "previous") == old

    cluster.ansible("launch.yml", *NANO, "-e", "steps=100000")
    cluster.wait("a checkpoint", lambda: step_of(cluster) >= 21, 120)
    assert "A run is active on node0" in cluster.refused("playbooks/rollback.yml")
    assert linked(cluster, "current") == new
    cluster.ansible("playbooks/stop.yml")
    stopped = step_of(cluster)

    said = cluster.ansible("playbooks/rollback.yml")
    assert f"release {Path(new['node3']).name} was left for {Path(old['node3']).name}" in " ".join(
        said.split()
    )
    assert (linked(cluster, "current"), linked(cluster, "previous")) == (old, new)

    # The controller still has the newer trainer: site.yml says that it stays away, and changes nothing.
    said = cluster.ansible("site.yml", *newer)
    assert "trainer_forward=true" in said
    assert all("changed=0" in line for line in said.splitlines() if "unreachable=" in line)
    assert linked(cluster, "current") == old

    cluster.ansible("launch.yml", *NANO, "-e", f"steps={stopped + 10}", "-e", "wait=true")
    assert [done["step"] for done in cluster.done("rolled")] == [stopped + 10] * 5
    versions = json.loads(cluster.sh("node0", f"cat {RUNS}/rolled/model_config.json"))["versions"]
    assert versions["release"] == Path(old["node0"]).name

    cluster.ansible("site.yml", *newer, "-e", "trainer_forward=true")
    assert linked(cluster, "current") == new
    cluster.ansible("site.yml")
    assert (linked(cluster, "current"), linked(cluster, "previous")) == (old, new)
