"""A copy of this repository as somebody's own, in which things are typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engine import Engine
from lab_cluster import copy_repository

TEXT = "El mar está en calma. La gente camina por la playa y mira las olas.\n\nLlueve en la ciudad.\n\n"
OWNER = 12345  # nobody that the image knows


@dataclass
class Workspace:
    """What a person types in the repository, as typed in the guide: `docker compose …` in front."""

    directory: Path
    engine: Engine
    compose: list[str]

    def command(self, words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"exec {' '.join(self.compose)} {words}"], cwd=self.directory,
            env=self.engine.environment | {"AURA_LANG": "en"} | variables,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def __call__(self, words: str, expect: int | None = 0, limit: float = 300, **variables: str) -> str:
        """What it says. `expect`: the exit code, or None for «it must fail»."""
        process = self.command(words, **variables)
        try:
            output = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{words} hangs: {process.communicate()[0][-3000:]}") from None
        good = process.returncode != 0 if expect is None else process.returncode == expect
        assert good, f"{words} ended with {process.returncode}:\n{output[-5000:]}"
        # What compose itself says about it.
        return re.sub(r"^ ?(Creating|Container) .*\n", "", output, flags=re.MULTILINE)


def built_workspace(engine: Engine, directory: Path) -> Workspace:
    """A copy of this repository, in which `make image` has been typed."""
    shutil.rmtree(directory, ignore_errors=True)
    copy_repository(directory)
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
