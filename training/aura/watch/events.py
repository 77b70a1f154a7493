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
    """`kind` is what happened (run.started, node.lost, gpu.fault …), `message` and `remedy` are sentences."""

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
    def dedup_key(self) -> str:
        """Two events with the same one say the same."""
        return ":".join(filter(None, (self.kind, self.host, self.run, str(self.facts.get("key", "")))))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def this_node() -> str:
    """Its name in the cluster: AURA_NODE, or what the machine calls itself."""
    return os.environ.get("AURA_NODE") or socket.gethostname().partition(".")[0]


def event_of(content: dict[str, Any]) -> Event:
    """What `as_json` was made of. Raises TypeError for anything else."""
    return Event(**content)


def payload(event: Event, cluster: str) -> dict[str, Any]:
    """What a webhook gets: the same keys for every kind of event."""
    return {
        "schema": SCHEMA,
        "event": event.kind,
        "severity": event.severity,
        "cluster": cluster,
        "host": event.host,
        "rank": event.rank,
        "run": event.run,
        "attempt": event.attempt,
        "step": event.step,
        "message": event.message[:LONGEST],
        "remedy": event.remedy,
        "facts": event.facts,
        "ts": event.ts,
        "dedup_key": event.dedup_key,
    }


def title_of(event: Event, cluster: str) -> str:
    return " · ".join(filter(None, (cluster, event.host, event.kind)))


def body_of(event: Event) -> str:
    return "\n".join(filter(None, (event.message[:LONGEST], event.remedy)))
