"""Virtual machines for the tests of this directory: `vm` gives one that has booted, in a second or two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machines

HERE = Path(__file__).parent
TIME_LIMIT = (
    2400  # seconds for one test: the first one builds the image and boots, perhaps on a busy computer
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIME_LIMIT))


@pytest.fixture(scope="session")
def vm() -> Iterator[Machines]:
    """vm(flavour="server", cards=1, ufw=False, fresh=False): see machines.py.

    AURA_KEEP_LAB=1 uses the machines of an earlier run, and leaves them: for work on these tests.
    """
    machines = Machines()
    yield machines
    if "AURA_KEEP_LAB" not in os.environ:
        machines.remove()
