"""Takes events from the queue to the services: again and again until each has them, and never as a flood."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aura.durable import write_atomically
from aura.texts.console import text
from aura.watch.events import Event
from aura.watch.queue import Entry, Queue
from aura.watch.services import Service, Services

QUIET = 900.0  # seconds in which the same is not said twice; what comes meanwhile is counted, and said at their end
FIRST_WAIT, LONGEST_WAIT = 5.0, 900.0  # seconds before a service that did not take a message is asked again
OFTEN = 4  # of the first of these waits: one that long comes after three tries, and from then on it may be the message


@dataclass
class Held:
    """What has been said under a key, and how often the same has come since."""

    said: float  # when, in seconds since the epoch
    count: int = 0
    last: dict[str, Any] = field(default_factory=dict)  # the last event that was not said


class Memory:
    """state.json beside the queue: what a sender that is started again must know. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state.json"
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.held = {key: Held(**held) for key, held in content["held"].items()}
            self.seen: dict[str, dict[str, Any]] = content["seen"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.held, self.seen = {}, {}

    def save(self) -> None:
        held = {key: vars(one) for key, one in self.held.items()}
        write_atomically(self.path, {"held": held, "seen": self.seen})


class Sender:
    """`say` gets a line for the journal about every message, without any address."""

    def __init__(
        self,
        queue: Queue,
        services: Services,
        memory: Memory,
        say: Callable[[str], None],
        quiet: float = QUIET,
        first_wait: float = FIRST_WAIT,
    ) -> None:
        self.queue, self.services, self.memory, self.say = queue, services, memory, say
        self.quiet, self.first_wait = quiet, first_wait
        self.wait: dict[str, float] = {}  # by a service's key: how long it is left alone
        self.not_before: dict[str, float] = {}  # and until when, on the monotonic clock
        self.refused: dict[str, Path] = {}  # and the message that it alone may have refused
        self.heart_at = 0.0
        self.heart_trouble = ""

    def round(self) -> None:
        """Look once, and deliver what can be delivered now. Raises OSError where the disk does."""
        self._say_what_was_held()
        entries = [taken for entry in self.queue.entries() if (taken := self._take(entry))]
        for service in self.services.services:
            if time.monotonic() >= self.not_before.get(service.key, 0.0):
                self._deliver_to(service, entries)
        self._beat()

    def is_idle(self) -> bool:
        return not any(True for _ in self.queue.entries())

    def _take(self, entry: Entry) -> Entry | None:
        """Where it has to go; None where the same was said a short while ago, or nobody wants it."""
        known = [service.key for service in self.services.services]
        if entry.pending is not None:
            pending = [key for key in entry.pending if key in known]
        elif self._is_repeated(entry.event):
            pending = []
        else:
            self.say(f"{entry.event.kind}: {entry.event.message}")
            pending = known
        if pending != entry.pending:
            entry = replace(entry, pending=pending)
            self.queue.keep_for(entry, pending)
        return entry if pending else None

    def _is_repeated(self, event: Event) -> bool:
        if held := self.memory.held.get(event.dedup_key):
            held.count, held.last = held.count + 1, asdict(event)
        else:
            self.memory.held[event.dedup_key] = Held(time.time())
        self.memory.save()
        return held is not None

    def _say_what_was_held(self) -> None:
        """One message for all that was the same, once it may be said again."""
        for key, held in list(self.memory.held.items()):
            if 0 <= time.time() - held.said < self.quiet:  # else the clock ran ahead then
                continue
            del self.memory.held[key]
            if held.count:
                last = Event(**held.last)
                message = text(
                    "event_repeated", count=held.count, minutes=self.quiet / 60, message=last.message
                )
                known = [service.key for service in self.services.services]
                self.queue.add(replace(last, message=message, ts=time.time()), known)
                self.memory.held[key] = Held(time.time())
            self.memory.save()

    def _deliver_to(self, service: Service, entries: list[Entry]) -> None:
        """In order; a service that does not take one is left alone for a while, then for longer. One that it does not
        take, though it takes the newest, twice with such a while between, is given up: all behind it would wait for
        ever."""
        waiting = [number for number, entry in enumerate(entries) if service.key in (entry.pending or [])]
        while waiting:
            trouble = self._send(service, entries, waiting[0])
            often = self.wait.get(service.key, 0.0) >= OFTEN * self.first_wait
            if trouble and often and len(waiting) > 1 and not self._send(service, entries, waiting[-1]):
                waiting.pop()
                # A line that comes and goes does the same, once.
                path = entries[waiting[0]].path
                if self.refused.get(service.key) == path:
                    self._give_up(service, entries, waiting[0], trouble)
                    trouble = ""
                self.refused[service.key] = path
            if trouble:
                wait = self.wait[service.key] = min(
                    2 * self.wait.get(service.key, self.first_wait / 2), LONGEST_WAIT
                )
                self.not_before[service.key] = time.monotonic() + wait
                self.say(text("not_delivered", service=service.name, seconds=wait, reason=trouble))
                return
            self.wait.pop(service.key, None)
            waiting.pop(0)

    def _send(self, service: Service, entries: list[Entry], number: int) -> str:
        """Why it was not delivered; empty when it was."""
        trouble = service.send(entries[number].event, self.services.cluster)
        if not trouble:
            self._done(service, entries, number)
        return trouble

    def _give_up(self, service: Service, entries: list[Entry], number: int, trouble: str) -> None:
        event = entries[number].event
        values = {"event": event.kind, "message": event.message, "reason": trouble}
        self.say(text("given_up", service=service.name, **values))
        self._done(service, entries, number)

    def _done(self, service: Service, entries: list[Entry], number: int) -> None:
        entry = entries[number]
        pending = [key for key in entry.pending or [] if key != service.key]
        self.queue.keep_for(entry, pending)
        entries[number] = replace(entry, pending=pending)

    def _beat(self) -> None:
        services = self.services
        if not services.heartbeat_url or time.monotonic() < self.heart_at:
            return
        self.heart_at = time.monotonic() + services.heartbeat_seconds
        trouble = services.heartbeat()
        if trouble != self.heart_trouble:  # once, not every minute
            self.say(text("no_heartbeat", reason=trouble) if trouble else text("heartbeat_again"))
        self.heart_trouble = trouble
