"""Which of the other nodes answer. A TCP connection is the question: the firewall of a node lets its peers in, but not
to SSH, so one that lives takes or refuses it, and one that does neither is off, frozen or cut off."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from aura.texts.console import text
from aura.watch.events import INFO, WARNING, Event

PORT = 9  # discard: nobody listens there, so nobody writes a line about it
TIMEOUT = 2.0
MISSES = 3  # in a row, until a node counts as lost
ALONE = 30  # looks in a row (1 to 5 minutes) at which none of several answers; sooner it may be its cable or the switch
BOOTING = 180.0  # seconds after a power cut, in which the others start too


def answers(address: str, port: int = PORT) -> bool:
    try:
        socket.create_connection((address, port), timeout=TIMEOUT).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


class Nodes:
    """`nodes`: name and address of all, in the order of the inventory. The first that lives tells of the others, so
    that there is one message, also when the first one of all is lost. `misses` is what was seen before."""

    def __init__(
        self,
        me: str,
        nodes: dict[str, str],
        misses: dict[str, int],
        is_there: Callable[[str], bool] = answers,
    ) -> None:
        self.me, self.others, self.is_there = me, {n: a for n, a in nodes.items() if n != me}, is_there
        self.before_me = list(nodes)[: list(nodes).index(me)]
        self.misses = {name: misses.get(name, 0) for name in self.others}
        self.alone = 0

    def look(self) -> list[Event]:
        there = {name: self.is_there(address) for name, address in self.others.items()}
        near = [name for name, count in self.misses.items() if count < MISSES]
        self.alone = self.alone + 1 if len(near) > 1 and not any(there.values()) else 0
        if 0 < self.alone < ALONE or time.clock_gettime(time.CLOCK_BOOTTIME) < BOOTING:
            return []
        lost_before = {name for name, count in self.misses.items() if count >= MISSES}
        for name, answered in there.items():
            self.misses[name] = 0 if answered else min(self.misses[name] + 1, MISSES)
        lost = {name for name, count in self.misses.items() if count >= MISSES}
        # The first that is back does not know that it was away.
        if not (lost.issuperset(self.before_me) or lost_before.issuperset(self.before_me)):
            return []
        return [
            self._event(name, name in lost) for name in self.others if (name in lost) != (name in lost_before)
        ]

    def _event(self, name: str, lost: bool) -> Event:
        values = {"node": name, "address": self.others[name], "me": self.me}
        if lost:
            remedy = text("node_lost_remedy")
            return Event("node.lost", WARNING, text("node_lost", **values), remedy, host=name)
        return Event("node.back", INFO, text("node_back", **values), host=name)
