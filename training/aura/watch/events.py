"""What a person is told of: one event, in words and as the JSON object that a webhook gets."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
INFO, WARNING, CRITICAL = "info", "warning", "critical"
LONGEST = 1500  # characters of a message: what Discord takes, 2000, less what stands around it


@dataclass(frozen=True)
class Event:
    """`kind` is what happened (run.started, rank.left, gpu.fault …), `message` and `remedy` are sentences."""

    kind: str
    severity: str
    message: str
    remedy: str = ""
    host: str = ""
    run: str = ""
    rank: int | None = None
    attempt: str = ""
    step: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # what else is known, in numbers
    ts: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def about(self) -> str:
        """The run or the card; of two events about one the later counts."""
        return self.run or self.dedup_key

    @property
    def dedup_key(self) -> str:
        """Two events with the same one say the same."""
        return ":".join(filter(None, (self.kind, self.host, self.run, str(self.facts.get("key", "")))))


def this_node() -> str:
    """Its name in the cluster: AURA_NODE, or what the machine calls itself."""
    return os.environ.get("AURA_NODE") or socket.gethostname().partition(".")[0]


def payload(event: Event, cluster: str) -> dict[str, Any]:
    """What a webhook gets beside the message: the same keys for every kind of event."""
    content = asdict(event)
    del content["message"]
    more = {"event": content.pop("kind"), "cluster": cluster, "dedup_key": event.dedup_key}
    return {"schema": SCHEMA, **content, **more}
