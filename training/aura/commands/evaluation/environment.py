"""Where the harness lives: an environment of its own, made when it is first asked for, so that no node carries what few
people need. torch it takes from the trainer's environment: that build fits this machine's card."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from aura.errors import DataError
from aura.texts.console import put, text

HARNESS = Path(__file__).with_name("harness.py")  # what runs there
LOCK = Path(__file__).with_name("requirements.txt")  # made by `make lock`
VARIABLE = "AURA_EVALUATE_IN"  # in place of the cache directory


def python() -> Path:
    """Of the environment. Raises DataError where it cannot be made."""
    trainer = sysconfig.get_path("purelib")
    which = hashlib.sha256(LOCK.read_bytes() + trainer.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aura"
    folder = Path(os.environ.get(VARIABLE) or cache) / f"evaluate-{which}"
    interpreter, complete = folder / "bin/python", folder / "complete"
    if complete.exists():
        return interpreter
    put(text("evaluate_installs", path=folder))
    # Whatever lacks in its lock is not looked for: torch and what belongs to it.
    options = ["--quiet", "--no-deps", "--require-hashes", "-r", str(LOCK)]
    if uv := _uv():
        make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--python", str(interpreter), *options]
    else:
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        install = [str(interpreter), "-m", "pip", "install", *options]
    try:
        subprocess.run(make, check=True)
        subprocess.run(install, check=True)
        (packages,) = folder.glob("lib/python3*/site-packages")
        (packages / "zz-trainer.pth").write_text(f"{trainer}\n", encoding="utf-8")  # behind its own packages
        complete.touch()
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise DataError("evaluate_not_installed", path=folder, error=error) from None
    return interpreter


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")
