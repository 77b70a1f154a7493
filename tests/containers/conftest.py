"""A copy of this repository as somebody's own, with an engine and the image that `make image` builds there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine, home_of_engine
from workspace import Workspace, built_workspace


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    with home_of_engine() as home:
        yield home


@pytest.fixture(scope="session")
def engine(home: Path) -> Iterator[Engine]:
    with Engine.running(home) as engine:
        yield engine


@pytest.fixture(scope="session")
def workspace(engine: Engine, home: Path) -> Workspace:
    return built_workspace(engine, home / "aura")
