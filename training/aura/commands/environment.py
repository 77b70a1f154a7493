"""Environments of their own for what few people need, made when it is first asked for, so that no node carries it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from aura.errors import DataError
from aura.storage import cache
from aura.texts.console import put, text


@dataclass(frozen=True)
class Environment:
    name: str
    holds: str  # what a person calls it
    megabytes: int
    lock: Path  # made by `make lock`
    # Behind its own packages those of the trainer: torch, in the build that fits this machine's card.
    on_trainer: bool = False

    @property
    def variable(self) -> str:
        """Names a place for it other than the cache directory."""
        return f"AURA_{self.name.upper()}_IN"

    def python(self) -> Path:
        """Raises DataError where it cannot be made."""
        place, folder = self.folder()
        interpreter, complete = folder / "bin/python", folder / "complete"
        if not complete.exists():
            with cache.alone_in(place, put):
                if not complete.exists():  # another process may have made it meanwhile
                    self._make(folder, interpreter)
                    complete.touch()
        return interpreter

    def folder(self) -> tuple[Path, Path]:
        """Where environments are, and this one: another one for other packages or another Python beneath."""
        interpreter = f"{sys.base_prefix} {sys.version_info[:2]}"
        below = sysconfig.get_path("purelib") if self.on_trainer else interpreter
        which = hashlib.sha256(self.lock.read_bytes() + below.encode()).hexdigest()[:12]
        named = os.environ.get(self.variable)
        place = Path(named) if named else cache.root()
        return place, place / f"{self.name}-{which}"

    def _make(self, folder: Path, interpreter: Path) -> None:
        values = {"what": self.holds, "path": folder, "megabytes": self.megabytes}
        put(text("installs", **values))
        # Whatever lacks in its lock is not looked for: torch and what belongs to it.
        options = ["--quiet", "--no-deps", "--require-hashes", "-r", str(self.lock)]
        if uv := _uv():
            make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
            install = [uv, "pip", "install", "--python", str(interpreter), *options]
        else:
            make = [sys.executable, "-m", "venv", "--clear", str(folder)]
            install = [str(interpreter), "-m", "pip", "install", *options]
        try:
            subprocess.run(make, check=True)
            subprocess.run(install, check=True)
            if self.on_trainer:
                (packages,) = folder.glob("lib/python3*/site-packages")
                behind = f"{sysconfig.get_path('purelib')}\n"
                (packages / "zz-trainer.pth").write_text(behind, encoding="utf-8")
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            raise DataError("not_installed", error=error, **values) from None


def _uv() -> str | None:
    """Beside this Python, on a node, or wherever there is one."""
    places = (Path(sys.executable).with_name("uv"), Path("/opt/aura/wheelhouse/uv"))
    return next((str(place) for place in places if place.exists()), shutil.which("uv"))
