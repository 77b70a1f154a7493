"""Where torch.compile keeps what it makes: in the run directory, under a name that its compilers take in one piece.

Inductor joins paths to one command line and splits that as a shell would (torch/_inductor/cpp_builder.py), without
quoting. A directory of a person may be called anything, so it gets a link beside it whose name is ours.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from aura.errors import ConfigError

COMPILED = "compiled"  # in the run directory; /tmp, where torch keeps it, is empty at every start of a unit
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def is_split(path: str | Path) -> bool:
    """Does a program that splits its command line take it for something else?"""
    try:
        return shlex.split(str(path)) != [str(path)]
    except ValueError:  # a quotation mark that is never closed
        return True


def check_path_of_torch(device: torch.device) -> None:
    """What is compiled for the processor is linked with torch's libraries, wherever they are. Raises ConfigError."""
    path = Path(torch.__file__).parent
    if device.type == "cpu" and is_split(path):
        raise ConfigError("torch_path_is_split", path=path)


def choose_directory(run_dir: Path) -> None:
    """Tell torch, and whatever it starts, unless a person has said where. Raises OSError."""
    if is_split(tempfile.gettempdir()):  # where it builds
        tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"  # noqa: S108
    directory = Path(os.environ.get(VARIABLE) or run_dir / COMPILED).absolute()
    os.environ[VARIABLE] = str(_linked(directory) if is_split(directory) else directory)


def directory() -> Path:
    """As a person knows it."""
    return Path(os.environ[VARIABLE]).resolve()


def _linked(directory: Path) -> Path:
    """The same link at every start: the kernels that are there name it."""
    directory.mkdir(parents=True, exist_ok=True)
    link = _of_this_user() / hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    with suppress(FileExistsError):  # of the start before, or of another rank
        link.symlink_to(directory)
    return link


def _of_this_user() -> Path:
    """What is compiled is executed: a directory of this name that others may write to is not taken."""
    place = Path(tempfile.gettempdir(), f"aura-{os.getuid()}")
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return place
    return Path(tempfile.mkdtemp(prefix="aura-"))
