"""Five bare PCs and no sixth: whoever sits at the first one makes all of them a cluster from there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from controller_node import ControllerNode
from lab_cluster import LAB

pytestmark = [pytest.mark.more, pytest.mark.timeout(3600)]

TYPED = "inventory/lab/state/password"


def lab(*words: str) -> None:
    subprocess.run([LAB, *words], stdin=subprocess.DEVNULL, timeout=300, check=True)


@pytest.fixture
def bare_node0() -> Iterator[ControllerNode]:
    """What the tests before this one have left of the five is gone."""
    lab("down")
    lab("up")
    yield ControllerNode()
    lab("down")


def test_from_bare_to_ready_by_a_controller_that_is_bare_itself(bare_node0: ControllerNode) -> None:
    bare_node0.ansible(
        "playbooks/bootstrap.yml",
        f"--connection-password-file={TYPED}",
        f"--become-password-file={TYPED}",
    )
    bare_node0.ansible("site.yml")
    again = bare_node0.ansible("site.yml")
    recap = [line for line in again.splitlines() if "changed=" in line]
    assert len(recap) == 5
    assert all("changed=0" in line and "failed=0" in line for line in recap), again[-3000:]
    bare_node0.ansible("playbooks/connectivity.yml")
    # All of them start again, the controller too.
    for node in range(5):
        lab("reboot", f"node{node}")
    assert "changed=0" in bare_node0.ansible("site.yml").splitlines()[-2]
    bare_node0.ansible("playbooks/connectivity.yml")
