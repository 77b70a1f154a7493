"""Five virtual nodes, provisioned by `make demo` itself; every test here uses the cluster that it leaves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from controller_node import ControllerNode
from lab_cluster import LAB, ROOT, Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for the demo, which has a bound of its own; on a slow machine it alone takes longer."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600, func_only=True))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """AURA_KEEP_LAB=1 uses the cluster of an earlier demo, and leaves it: for work on these tests."""
    keep = "AURA_KEEP_LAB" in os.environ
    output = ROOT / "demo-logs/output.log"
    if not (keep and output.exists()):
        with output_of_demo(output) as out:
            demo = subprocess.run(
                [ROOT / "tests/e2e/demo"], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=1500, check=False,
            )  # fmt: skip
        if demo.returncode != 0:
            pytest.exit(f"make demo failed:\n{output.read_text()}", returncode=1)
    print(output.read_text())
    yield Cluster(output.read_text(), tmp_path_factory.mktemp("ansible"))
    if not keep:
        subprocess.run([LAB, "down"], stdin=subprocess.DEVNULL, timeout=180, check=True)


@pytest.fixture(scope="session")
def node0(cluster: Cluster) -> ControllerNode:
    return ControllerNode()


def output_of_demo(path: Path) -> IO[str]:
    path.parent.mkdir(exist_ok=True)
    return path.open("w")
