"""Takes events to the services: three tries each, and never as a flood. The journal has every one of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from aura.texts.console import text
from aura.watch.events import Event
from aura.watch.services import Service, Services

PAUSES = (
    30.0,
    300.0,
)  # seconds before the second try and before the third: a router has started again by then
MOST, WITHIN = (
    20,
    900.0,
)  # messages in so many seconds; of what comes beyond them only the last of each run and card


class Sender:
    """`say` gets a line for the journal about every message, without any address."""

    def __init__(
        self, services: Services, say: Callable[[str], None], pauses: Sequence[float] = PAUSES
    ) -> None:
        self.services, self.say, self.pauses = services, say, pauses
        self.waiting: dict[str, deque[Event]] = {one.key: deque() for one in services.services}
        self.failed = dict.fromkeys(self.waiting, 0)  # tries of the first that waits
        self.not_before = dict.fromkeys(self.waiting, 0.0)  # on the monotonic clock
        self.told: deque[float] = deque(maxlen=MOST)  # when
        self.held: dict[str, Event] = {}  # by what they are about
        self.heart_at, self.heart_trouble = 0.0, ""

    def tell(self, event: Event) -> None:
        self.say(f"{event.kind}: {event.message}")
        if self._has_room() and not self.held:
            self._take(event)
            return
        self.held.pop(event.about, None)  # the newer one comes behind the others
        self.held[event.about] = event

    def round(self) -> None:
        """Deliver what can be delivered now."""
        while self.held and self._has_room():
            self._take(self.held.pop(next(iter(self.held))))
        for service in self.services.services:
            while self.waiting[service.key] and time.monotonic() >= self.not_before[service.key]:
                self._try(service)
        self._beat()

    def _has_room(self) -> bool:
        return len(self.told) < MOST or time.monotonic() - self.told[0] > WITHIN

    def _take(self, event: Event) -> None:
        self.told.append(time.monotonic())
        for waiting in self.waiting.values():
            waiting.append(event)

    def is_idle(self) -> bool:
        return not self.held and not any(self.waiting.values())

    def _try(self, service: Service) -> None:
        """The first that waits: in order, so that one that is down gets them as they came."""
        key, event = service.key, self.waiting[service.key][0]
        trouble = service.send(event, self.services.cluster)
        failed = self.failed[key] + 1 if trouble else 0
        if 0 < failed <= len(self.pauses):
            pause = self.pauses[failed - 1]
            self.failed[key], self.not_before[key] = failed, time.monotonic() + pause
            self.say(text("not_delivered", service=service.name, seconds=pause, reason=trouble))
            return
        if failed:
            values = {"event": event.kind, "message": event.message, "reason": trouble}
            self.say(text("given_up", service=service.name, tries=failed, **values))
        self.failed[key] = 0
        self.waiting[key].popleft()

    def _beat(self) -> None:
        services = self.services
        if not services.heartbeat_url or time.monotonic() < self.heart_at:
            return
        self.heart_at = time.monotonic() + services.heartbeat_seconds
        trouble = services.heartbeat()
        if trouble != self.heart_trouble:  # once, not every minute
            self.say(text("no_heartbeat", reason=trouble) if trouble else text("heartbeat_again"))
        self.heart_trouble = trouble
