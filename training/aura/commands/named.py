"""What a command line calls a model: a run, by its directory or its name in runs/, a checkpoint, or an exported model;
and what it names in object storage, on this machine.

torch is imported only to look for a model; the cache, the bars and s3fs only for an address.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura.checkpoint.manifest import MANIFEST
from aura.errors import ConfigError, Parser
from aura.storage.address import Address, place


@dataclass(frozen=True)
class Model:
    path: Path  # a checkpoint, or what transformers loads as it is
    run: Path | None  # whose newest checkpoint it is


def places(named: Path) -> tuple[Path, Path]:
    """Where a run of this name may be."""
    return named, Path("runs", named)


def corpus_here(named: Path | Address) -> Path:
    """Raises ConfigError, DataError, Unreachable."""
    if isinstance(named, Path):
        return named
    from aura.commands.bars import Bars
    from aura.corpus.remote import fetch

    with Bars() as bars:
        return fetch(named, bars)


def model_named(named: Path | Address) -> Model:
    """Raises ConfigError where there is none, DataError, Unreachable."""
    if isinstance(named, Address):
        from aura.checkpoint.remote import fetch_to_use
        from aura.commands.bars import Bars

        with Bars() as bars:
            return Model(fetch_to_use(named, bars), None)
    from aura.model import export

    for path in places(named):
        if export.is_exported(path) or (path / MANIFEST).exists():
            return Model(path, None)
        if (path / export.CHECKPOINTS).is_dir():
            return Model(export.newest(path, print), path)
    raise ConfigError("no_model_named", path=named)


def add_model(parser: Parser, with_flag: bool = False) -> None:
    """with_flag: the run behind --run-dir, as the guides have it."""
    which = parser.add_mutually_exclusive_group(required=True)
    about: dict[str, Any] = {
        "type": Path,
        "metavar": "RUN",
        "help": "a run's directory, or its name in runs/",
    }
    if with_flag:
        which.add_argument("--run-dir", dest="run", **about)
    else:
        which.add_argument("run", nargs="?", **about)
    which.add_argument(
        "--checkpoint",
        type=place,
        metavar="DIR",
        help="this checkpoint, also one of s3://…, or what aura export has written",
    )


def model_asked(arguments: Namespace) -> Model:
    """What `add_model` has found on the command line."""
    return model_named(arguments.checkpoint or arguments.run)
