"""A checkpoint behind an URL, where a copy of its run is: fetched whole, with its checksums, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from aura.checkpoint import manifest
from aura.corpus.corpus import TOKENIZER, TOKENIZER_CONFIG
from aura.corpus.listener import Listener
from aura.corpus.remote import File, fetch_files
from aura.durable import publish
from aura.errors import ConfigError, DataError
from aura.storage import cache
from aura.storage.address import Address
from aura.storage.remote import Remote
from aura.texts.console import text

KIND = "runs"


def fetch(address: Address, checkpoints: Path, listener: Listener) -> Path:
    """Into a directory of checkpoints, under the name that it has there; what is there already is not fetched again.

    Raises ConfigError, DataError, Refused, Unreachable.
    """
    remote = Remote(address)
    content, files = _manifest(remote)
    final = checkpoints / address.name
    with cache.alone_in(checkpoints, listener.say):
        if final.is_dir():
            there = final / manifest.MANIFEST
            if not there.is_file() or there.read_bytes() != content:
                raise ConfigError("another_checkpoint_here", path=final, address=address)
            return final
        for left in checkpoints.glob(f"{address.name}{manifest.TEMPORARY}*"):  # by one that was killed
            shutil.rmtree(left)
        # The trainer removes what has this in its name, too.
        temporary = checkpoints / f"{address.name}{manifest.TEMPORARY}{os.getpid()}"
        temporary.mkdir()
        try:
            fetch_files(remote, files, temporary, listener)
            (temporary / manifest.MANIFEST).write_bytes(content)
            publish(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    listener.say(text("checkpoint_fetched", address=address, path=final))
    return final


def fetch_to_use(address: Address, listener: Listener) -> Path:
    """Into the cache, with the tokenizer of its run: for an export or a sample."""
    run = address.parent.parent
    directory = cache.directory_of(KIND, run)
    path = fetch(address, directory / "checkpoints", listener)
    remote = Remote(run)
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        content = remote.read(name)
        if content is not None:
            (directory / name).write_bytes(content)
        elif name == TOKENIZER:  # runs of an earlier release have no other one
            raise ConfigError("run_tokenizer_missing", file=run / name)
    return path


def _manifest(remote: Remote) -> tuple[bytes, dict[str, File]]:
    """As it is, and what it says of the files."""
    address = remote.address
    content = remote.read(manifest.MANIFEST) if manifest.NAME.fullmatch(address.name) else None
    if content is None:
        names = Remote(address.parent).directories_with(manifest.MANIFEST)
        raise ConfigError("no_checkpoint_there", address=address, names=", ".join(names) or text("none"))
    try:
        said = manifest.parse(content, manifest.step_of(Path(address.name)))
        return content, {name: File(file["sha256"], file["bytes"]) for name, file in said["files"].items()}
    except (manifest.Damaged, LookupError, TypeError) as reason:
        raise DataError("checkpoint_unusable", path=address, reason=reason) from None
