"""A copy of this repository as somebody's own, with an engine and the image that `make image` builds there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import ROOT, Engine
from workspace import OWNER, TEXT, Workspace


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """Where all of it lies. AURA_KEEP_LAB=1 leaves what was built: for work on these tests."""
    keep = "AURA_KEEP_LAB" in os.environ
    home = (
        Path("/var/tmp/aura-containers") if keep else Path(tempfile.mkdtemp(prefix="aura-", dir="/var/tmp"))
    )
    home.mkdir(exist_ok=True)
    yield home
    if not keep:
        shutil.rmtree(home)


@pytest.fixture(scope="session")
def engine(home: Path) -> Iterator[Engine]:
    if os.geteuid() != 0:
        pytest.fail("A Docker Engine is started for these tests, which needs root: sudo make test-more")
    ubuntu = "ID=ubuntu" in Path("/etc/os-release").read_text().splitlines()
    packages = ["docker.io", "docker-compose-v2" if ubuntu else "docker-compose"]
    subprocess.run([ROOT / "requirements/apt", *packages], check=True, timeout=600)
    (home / "docker").mkdir(exist_ok=True)
    engine = Engine(home / "docker")
    try:
        engine.wait()
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="session")
def workspace(engine: Engine, home: Path) -> Workspace:
    directory = home / "aura"
    shutil.rmtree(directory, ignore_errors=True)
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, stdout=subprocess.PIPE, check=True,
    ).stdout  # fmt: skip
    copy = ["rsync", "--archive", "--from0", "--files-from=-", f"{ROOT}/", f"{directory}/"]
    subprocess.run(copy, input=files, check=True)
    # What must not come into the image or be seen by what runs in it.
    (directory / "inventory/lan/state").mkdir()
    (directory / "inventory/lan/state/id_ed25519").write_text("a secret key")
    (directory / "words.txt").write_text(TEXT * 60, encoding="utf-8")
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, OWNER, OWNER)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    subprocess.run(
        ["container/build", os.environ.get("AURA_CACHE") or f"{caches}/aura", sys.executable, "cpu"],
        cwd=directory, check=True, timeout=1500, stdin=subprocess.DEVNULL,
        env=engine.environment | {"SUDO_UID": str(OWNER), "SUDO_GID": str(OWNER)},
    )  # fmt: skip
    plugin = engine.docker("compose", "version", check=False).returncode == 0
    return Workspace(directory, engine, ["docker", "compose"] if plugin else ["docker-compose"])
