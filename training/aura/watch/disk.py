"""A disk that is nearly full ends checkpoints; it is said while there is time to make room."""

from __future__ import annotations

import shutil
from pathlib import Path

from aura.texts.console import text
from aura.watch.events import INFO, WARNING, Event

# Parts of a disk that are taken; between the two nothing is said: a checkpoint comes and goes.
NEARLY_FULL, AGAIN_FREE = 0.90, 0.80


def look_at_disk(path: Path, host: str, was_full: bool) -> tuple[bool, list[Event]]:
    """Whether it counts as full now, and what there is to say. Raises OSError."""
    while not path.exists():  # no run has begun yet
        path = path.parent
    disk = shutil.disk_usage(path)
    taken = 1 - disk.free / disk.total
    is_full = taken >= (AGAIN_FREE if was_full else NEARLY_FULL)
    if is_full == was_full:
        return is_full, []
    values = {"path": path, "node": host, "free": disk.free / 1e9, "taken": taken}
    if is_full:
        message, remedy = text("disk_nearly_full", **values), text("disk_nearly_full_remedy", path=path)
        return True, [
            Event("disk.full", WARNING, message, remedy, host=host, facts={"free_bytes": disk.free})
        ]
    return False, [Event("disk.free", INFO, text("disk_free_again", **values), host=host)]
