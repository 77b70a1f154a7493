"""rank-<r>/status.json: what this rank is doing, for `playbooks/status.yml` and whoever else wants to know."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aura.durable import write_atomically
from aura.errors import why_not_written
from aura.texts.console import put, text
from aura.watch.runs import begun_of

STATES = ("joining", "training", "saving", "stopped", "done", "failed")
PAUSE = 1.0  # seconds between two writes while nothing but numbers changes
LAST_WORD = ("pid", "state", "step", "message", "exit_code", "updated")


class Status:
    """Fields keep their value until they are set again. Losses are nats per token."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.path = path
        self.fields: dict[str, Any] = {
            "rank": None,
            "world_size": None,
            "node": None,
            "device": None,
            "gpu": None,  # its UUID
            "attempt": None,
            "state": None,
            "step": 0,
            "max_steps": None,
            "epoch": 0,
            "loss": None,
            "validation_loss": None,
            "bits_per_byte": None,  # at the last validation
            "bits_per_byte_of_parts": {},  # where the corpus is a mixture, by name
            "tokens_per_second": None,
            "eta": None,  # seconds until the last step, at the mean since the start
            "sync": None,
            "leads": None,  # whether it is the lowest rank of those that train; None before it has met them
            "away": [],  # ranks of the launch without which this attempt trains
            "waited": None,  # seconds for other ranks and the wire, since the logged step before
            "setting": None,  # strategy, wire and delay of several ranks
            "shares": None,  # sequences of each rank in a step, where they follow measured speeds
            "message": "",
            "pid": os.getpid(),  # a process that is gone can say nothing any more
            "begun": begun_of(os.getpid()),  # its number may be another's by then
            "exit_code": None,  # once it has come to an end of its own
            "plan": None,  # of rank 0: what was predicted, line by line
            "outcome": None,  # of rank 0: that against what was measured
            "before": _last_word(path),
            **fields,
        }
        self.written = 0.0
        self.trouble: str | None = None  # why the file could not be written; said once
        self.lock = threading.Lock()  # the process group's threads report its end

    def also(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """That too: what is said is what this rank waits for."""

        def said(sentence: str) -> None:
            self.set(message=sentence)
            say(sentence)

        return said

    def set(self, at_once: bool = False, **fields: Any) -> None:
        """Written at once when the state or the message changes, otherwise at most once in PAUSE seconds.

        A full disk must not stop a training that fits into memory: the status is then simply old.
        """
        assert set(fields) <= set(self.fields), fields
        assert fields.get("state", STATES[0]) in STATES, fields
        with self.lock:
            news = any(self.fields[key] != fields.get(key, self.fields[key]) for key in ("state", "message"))
            self.fields.update(fields)
            if not (at_once or news) and time.monotonic() - self.written < PAUSE:
                return
            self.written = time.monotonic()
            try:
                write_atomically(self.path, {**self.fields, "updated": time.time()})
                self.trouble = None
            except OSError as error:
                if (reason := why_not_written(error)) != self.trouble:
                    put(text("status_not_written", path=self.path, error=reason))
                self.trouble = reason


def _last_word(path: Path) -> dict[str, Any] | None:
    """Of the process before this one, which may have followed it sooner than anybody looked."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return {name: said[name] for name in LAST_WORD}
    except (OSError, ValueError, LookupError, TypeError):
        return None
