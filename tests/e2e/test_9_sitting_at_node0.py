"""Five bare PCs and no sixth: whoever sits at the first one makes all of them a cluster from there."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from controller_node import AS_ROOT, ControllerNode
from lab_cluster import lab

pytestmark = [pytest.mark.more, pytest.mark.timeout(3600)]

TYPED = "inventory/lab/state/password"


@pytest.fixture
def bare_node0() -> Iterator[ControllerNode]:
    """What the tests before this one have left of the five is gone."""
    lab("down")
    lab("up")
    yield ControllerNode()
    lab("down")


def test_from_bare_to_ready_by_a_controller_that_is_bare_itself(bare_node0: ControllerNode) -> None:
    node0 = bare_node0
    words = f"--connection-password-file={TYPED}", f"--become-password-file={TYPED}"
    node0.ansible("playbooks/bootstrap.yml", *words)
    node0.ansible("site.yml")
    assert_nothing_changes(node0)
    node0.ansible("playbooks/connectivity.yml")

    # Who reboots the node that it runs on does not see the end of it.
    booted = "systemctl show --property=InvocationID --value sysinit.target"
    before = node0.run(booted)
    assert "cannot reboot itself" in node0.ansible("playbooks/reboot.yml", "--limit", "node0")
    assert node0.run(booted) == before

    # All of them start again, the controller too, and nobody helps.
    for node in range(5):
        lab("reboot", f"node{node}")
    assert_nothing_changes(node0)
    text = node0.run("find aura/docs -name '*.md' -print0 | xargs -0 cat >text.txt && readlink -f text.txt")
    node0.ansible("playbooks/prepare.yml", "-e", f"text={text.strip()}", "-e", "preset=gpt2-nano")
    launch = ["preset=gpt2-nano", "run=from-node0", "steps=3", "wait=true"]
    node0.ansible("launch.yml", *(word for setting in launch for word in ("-e", setting)))
    done = node0.run("cat /var/lib/aura/runs/from-node0/done.json", AS_ROOT)
    assert json.loads(done)["step"] == 3


def assert_nothing_changes(node0: ControllerNode) -> None:
    said = node0.ansible("site.yml")
    recap = [line for line in said.splitlines() if "changed=" in line]
    assert len(recap) == 5
    assert all("changed=0" in line and "failed=0" in line for line in recap), said[-3000:]
