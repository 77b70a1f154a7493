"""What a checkpoint's directory is called and holds, and whether its bytes are those that were written.

Standard library only, so that who copies checkpoints does not load torch for it. aura/checkpoint/store.py writes them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from aura.corpus.corpus import sha256_of
from aura.texts.console import text

FORMAT = "aura-checkpoint-1"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
TEMPORARY = ".tmp-"  # in the name of what is not complete
NAME = re.compile(r"(checkpoint|interrupt)-step-(\d+)")


class Damaged(Exception):
    """A checkpoint that must not be used; the text says why."""


class Writer(NamedTuple):
    """The attempt that wrote a checkpoint. The attempts of a run are counted; two that knew nothing of each other may
    have the same number. 0: written before they were counted."""

    number: int = 0
    attempt: str = ""
    # The attempts before it, whatever its ranks' disks held of them. None: written before that was noted.
    known: tuple[str, ...] | None = None


def step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[2])


def checkpoints(directory: Path) -> list[Path]:
    """Those in a directory, complete and in no order; none where there is no directory."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if NAME.fullmatch(path.name)]


def writer_of(manifest: dict[str, Any]) -> Writer:
    # Beside the writer, not in it: an older release takes a writer with more in it for damage.
    known = manifest.get("known")
    return Writer(**manifest.get("writer", {}), known=None if known is None else tuple(known))


def follows(later: Writer, earlier: Writer) -> bool:
    """Did the later attempt know of the earlier one, and go on from it or leave it behind?"""
    # What was written before attempts were counted, nobody notes.
    if later.known is None or not earlier.attempt:
        return later.number > earlier.number
    return earlier.attempt in later.known


def described(writer: Writer) -> dict[str, Any]:
    """As `writer_of` reads it."""
    known = {} if writer.known is None else {"known": list(writer.known)}
    return {"writer": {"number": writer.number, "attempt": writer.attempt}, **known}


def read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, `files` by name: `sha256` and `bytes`. Raises Damaged."""
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    named = NAME.fullmatch(path.name)
    return parse(content, int(named[2]) if named else None)


def parse(content: bytes, step: int | None) -> dict[str, Any]:
    """What a manifest.json says of the checkpoint of this step (None: its name says none, as that of a copy, or of one
    that was set aside). Raises Damaged."""
    try:
        manifest: dict[str, Any] = json.loads(content)
        if manifest["format"] != FORMAT or set(manifest["files"]) != {MODEL, OPTIMIZER, STATE}:
            raise Damaged(text("unknown_format", file=MANIFEST))
        if step not in (None, manifest["step"]):
            raise Damaged(text("of_another_step", file=MANIFEST, step=manifest["step"]))
        writer_of(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every byte is right. Raises Damaged."""
    manifest = read(path)
    try:
        for name, entry in manifest["files"].items():
            if (size := (path / name).stat().st_size) != entry["bytes"]:
                raise Damaged(text("other_size", file=name, size=size, wanted=entry["bytes"]))
            if sha256_of(path / name) != entry["sha256"]:
                raise Damaged(text("other_checksum", file=name))
    except (OSError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return manifest
