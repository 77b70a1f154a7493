"""What a command line names in object storage, on this machine; a path stays what it is.

The cache, the bars and s3fs are imported only for an address.
"""

from __future__ import annotations

from pathlib import Path

from aura.storage.address import Address


def corpus_here(place: Path | Address) -> Path:
    """Raises ConfigError, DataError, Unreachable, as all here."""
    if isinstance(place, Path):
        return place
    from aura.commands.bars import Bars
    from aura.corpus.remote import fetch

    with Bars() as bars:
        return fetch(place, bars)


def checkpoint_here(place: Path | Address) -> Path:
    """With the tokenizer of its run."""
    if isinstance(place, Path):
        return place
    from aura.commands.bars import Bars
    from aura.copies.fetch import fetch_to_use

    with Bars() as bars:
        return fetch_to_use(place, bars)


def checkpoint_in(place: Path | Address, checkpoints: Path) -> Path:
    """Among the checkpoints of a run."""
    if isinstance(place, Path):
        return place
    from aura.commands.bars import Bars
    from aura.copies.fetch import fetch

    with Bars() as bars:
        return fetch(place, checkpoints, bars)
