"""A checkpoint out of object storage, where `aura copy-runs` has put it: whole, with its checksums, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from aura.checkpoint import manifest
from aura.corpus.corpus import TOKENIZER, TOKENIZER_CONFIG, sha256_of
from aura.corpus.listener import Listener
from aura.durable import publish
from aura.errors import ConfigError, DataError
from aura.storage import cache
from aura.storage.address import Address
from aura.storage.bucket import Bucket
from aura.texts.console import text

KIND = "runs"


def fetch(address: Address, checkpoints: Path, listener: Listener) -> Path:
    """Into a directory of checkpoints, under the name that it has there; what is there already is not fetched again.

    Raises ConfigError, DataError, Refused, Unreachable.
    """
    bucket = Bucket(address)
    content, files = _look(bucket, address)
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
            size = sum(entry["bytes"] for entry in files.values())
            cache.check_room(checkpoints, size, address)
            bar = listener.start(text("fetching"), size)
            for name, entry in files.items():
                bucket.download(address / name, temporary / name, bar)
                if sha256_of(temporary / name) != entry["sha256"]:
                    reason = text("other_checksum", file=name)
                    raise DataError("checkpoint_unusable", path=address, reason=reason)
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
    tokenizer = Bucket(run).read(run / TOKENIZER)
    if tokenizer is None:
        raise ConfigError("run_tokenizer_missing", file=run / TOKENIZER)
    special = Bucket(run).read(run / TOKENIZER_CONFIG)  # runs of an earlier release have none
    with cache.alone_in(directory, listener.say):
        (directory / TOKENIZER).write_bytes(tokenizer)
        if special is not None:
            (directory / TOKENIZER_CONFIG).write_bytes(special)
    return path


def _look(bucket: Bucket, address: Address) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """The manifest as it is, and what it says of the files."""
    content = bucket.read(address / manifest.MANIFEST) if manifest.NAME.fullmatch(address.name) else None
    if content is None:
        there = {
            name.split("/")[0] for name in bucket.entries(address.parent) if name.endswith(manifest.MANIFEST)
        }
        names = ", ".join(sorted(there)) or text("none")
        raise ConfigError("no_checkpoint_there", address=address, names=names)
    try:
        files = manifest.parse(content, manifest.step_of(Path(address.name)))["files"]
    except manifest.Damaged as reason:
        raise DataError("checkpoint_unusable", path=address, reason=reason) from None
    return content, files
