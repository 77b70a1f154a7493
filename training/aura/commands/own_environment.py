"""Environments beside the trainer's, made when they are first asked for: no node carries what few people need."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from aura.errors import DataError
from aura.texts.console import put, text


def python(lock: Path, name: str, variable: str, what: str, megabytes: int) -> Path:
    """The interpreter of the environment in which this lock is installed; `variable` names another place than the cache
    directory. Raises DataError where it cannot be made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aura"
    which = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    folder = Path(os.environ.get(variable) or cache) / f"{name}-{which}"
    interpreter, complete = folder / "bin/python", folder / "complete"
    if complete.exists():
        return interpreter
    put(text("environment_installs", what=what, path=folder, megabytes=megabytes))
    options = ["--quiet", "--no-deps", "--require-hashes", "-r", str(lock)]
    if uv := _uv():
        make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--python", str(interpreter), *options]
    else:
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        install = [str(interpreter), "-m", "pip", "install", *options]
    try:
        subprocess.run(make, check=True)
        subprocess.run(install, check=True)
        complete.touch()
    except (OSError, subprocess.CalledProcessError) as error:
        raise DataError("environment_not_installed", what=what, path=folder, error=error) from None
    return interpreter


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")
