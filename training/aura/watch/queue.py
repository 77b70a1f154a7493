"""The events that wait for a service, on the disk: one JSON file each.

    queue/<time in ns>-<process>.json    {"event": …, "pending": null or the names of the services that lack it}

Whoever has something to tell puts a file there and goes on; nobody but the sender takes one away. A file goes when its
last service has it, so a kill at any moment loses nothing; in the moment between the delivery and that, it may make a
message come twice (the same `ts` and `dedup_key`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from aura.durable import write_atomically
from aura.watch.events import Event

MOST = 1000  # files; with more of them the oldest are thrown away. Not by age: the clock may have been wrong


@dataclass(frozen=True)
class Entry:
    path: Path
    event: Event
    pending: list[str] | None  # None: the sender has not seen it yet


class Queue:
    """Raises OSError, where the disk does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "queue"

    def add(self, event: Event, pending: list[str] | None = None) -> None:
        path = self.directory / f"{time.time_ns():020}-{os.getpid()}.json"
        self._write(path, event, pending)

    def entries(self) -> Iterator[Entry]:
        """From the oldest on. What is no event is thrown away."""
        paths = sorted(self.directory.glob("*.json"))
        for path in paths[: max(0, len(paths) - MOST)]:
            path.unlink(missing_ok=True)
        for path in paths[max(0, len(paths) - MOST) :]:
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                entry = Entry(path, Event(**content["event"]), content["pending"])
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)
                continue
            yield entry

    def keep_for(self, entry: Entry, pending: list[str]) -> None:
        """These services still lack it; it goes when there are none."""
        if pending:
            self._write(entry.path, entry.event, pending)
        else:
            entry.path.unlink(missing_ok=True)

    def _write(self, path: Path, event: Event, pending: list[str] | None) -> None:
        write_atomically(path, {"event": asdict(event), "pending": pending}, flushed=True)
