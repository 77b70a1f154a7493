"""A user with five PCs has no sixth: node0 is the controller itself."""

from __future__ import annotations

from controller_node import ControllerNode
from lab_cluster import Cluster


def test_site_and_launch_from_inside_node0(cluster: Cluster, node0: ControllerNode) -> None:
    site = node0.ansible("site.yml")
    recap = [line for line in site.splitlines() if "changed=" in line]
    assert len(recap) >= 5
    assert all("changed=0" in line and "failed=0" in line for line in recap), site[-3000:]
    launch = ["preset=gpt2-nano", "run=from-node0", "steps=3", "wait=true"]
    node0.ansible("launch.yml", *(word for setting in launch for word in ("-e", setting)))
    assert [done["step"] for done in cluster.done("from-node0")] == [3] * 5
    # Who reboots the node that it runs on does not see the end of it.
    booted = "systemctl show --property=InvocationID --value sysinit.target"
    before = node0.run(booted)
    assert "cannot reboot itself" in node0.ansible("playbooks/reboot.yml", "--limit", "node0")
    assert node0.run(booted) == before
