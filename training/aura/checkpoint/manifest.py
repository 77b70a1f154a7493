"""What a checkpoint's directory is called and holds, and whether its bytes are those that were written.

Standard library only, so that who copies checkpoints does not load torch for it. aura/checkpoint/store.py writes them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from aura.corpus.corpus import sha256_of

FORMAT = "aura-checkpoint-1"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
NAME = re.compile(r"(checkpoint|interrupt)-step-(\d+)")


class Damaged(Exception):
    """A checkpoint that must not be used; the text says why."""


def step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[2])


def checkpoints(directory: Path) -> list[Path]:
    """Those in a directory, complete and in no order; none where there is no directory."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if NAME.fullmatch(path.name)]


def read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, `files` by name: `sha256` and `bytes`. Raises Damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or set(manifest["files"]) != {MODEL, OPTIMIZER, STATE}:
            raise Damaged(f"{MANIFEST} has an unknown format")
        if manifest["step"] != step_of(path):
            raise Damaged(f"{MANIFEST} is of step {manifest['step']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every byte is right. Raises Damaged."""
    manifest = read(path)
    try:
        for name, entry in manifest["files"].items():
            if (size := (path / name).stat().st_size) != entry["bytes"]:
                raise Damaged(f"{name} has {size} bytes instead of {entry['bytes']}")
            if sha256_of(path / name) != entry["sha256"]:
                raise Damaged(f"the checksum of {name} differs")
    except (OSError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return manifest
