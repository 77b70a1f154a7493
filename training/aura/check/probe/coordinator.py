"""Who measures when: the first node conducts, the others obey."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aura.check.probe import limits
from aura.check.probe.wire import Json, Line, Settings
from aura.errors import in_words


def rounds(nodes: list[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds of disjoint pairs (circle method): n rounds for odd n, n - 1 for even n.

    >>> rounds(["a", "b", "c", "d"])
    [[('a', 'd'), ('b', 'c')], [('a', 'c'), ('d', 'b')], [('a', 'b'), ('c', 'd')]]
    """
    circle: list[str | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


@dataclass
class Coordinator:
    """Conducts the measurements from the first node; holds a control connection to each of the others."""

    settings: Settings
    controls: dict[str, Line]
    local: Callable[[str], Json]  # measures from this node to the named one
    lost: dict[str, str] = field(default_factory=dict)  # node -> what happened

    def gather(self, deadline: float) -> None:
        """Waits until every node has come, or until the deadline; those that came are told to wait."""
        while time.monotonic() < deadline and not all(n in self.controls for n in self.settings.others):
            for name in [*self.controls]:
                self._tell(name, {"do": "wait"})
            time.sleep(0.1)
        for name in self.settings.others:
            if name not in self.controls:
                self.lost[name] = in_words("probe_did_not_come")

    def present(self) -> list[str]:
        here = [name for name in self.settings.others if name in self.controls and name not in self.lost]
        return [self.settings.node, *here]

    def conduct(self) -> None:
        """Measures all ordered pairs, then once more, alone, those well below the link's speed."""
        deadline = time.monotonic() + limits.BANDWIDTH_BUDGET
        slow: list[tuple[str, str]] = []
        for pairs in rounds(self.present()):
            for slot in (pairs, [(b, a) for a, b in pairs]):
                slow += self._measure(slot, deadline)
        for pair in slow:
            self._measure([pair], deadline)
        for name in self.present()[1:]:
            self._tell(name, {"do": "end"})

    def _measure(self, slot: list[tuple[str, str]], deadline: float) -> list[tuple[str, str]]:
        """One slot of disjoint (sender, receiver); returns the pairs that were slow."""
        here = self.present()
        slot = [(sender, receiver) for sender, receiver in slot if sender in here and receiver in here]
        if not slot or time.monotonic() > deadline:
            return []
        end = time.monotonic() + limits.SLOT_LIMIT
        orders: dict[str, Json] = {name: {"do": "wait"} for name in here}
        orders.update({sender: {"do": "send", "to": receiver} for sender, receiver in slot})
        for name in here[1:]:
            self._tell(name, orders[name])
        slow = []
        for sender, receiver in sorted(slot, key=lambda pair: pair[0] != self.settings.node):  # own one first
            if sender == self.settings.node:
                result = self.local(receiver)
            elif sender in self.lost:
                continue
            else:
                try:
                    result = self.controls[sender].receive(max(0.1, end - time.monotonic()))
                except OSError as error:
                    self._lose(sender, error)
                    continue
            if result.get("ok") and result["mbit_per_second"] < 0.8 * self.settings.expected_mbit:
                slow.append((sender, receiver))
        return slow

    def _tell(self, name: str, message: Json) -> None:
        if name in self.lost:
            return
        try:
            self.controls[name].send(message)
        except OSError as error:
            self._lose(name, error)

    def _lose(self, name: str, error: OSError) -> None:
        self.lost[name] = in_words("probe_left", error=error)


def obey(control: Line, measure: Callable[[str], Json], first_wait: float) -> str | None:
    """Does what the coordinator says until it says "end". Returns None, or why it ended early. The first word may
    take longer (seconds): the coordinator speaks only when it has tried to reach everybody itself."""
    limit = first_wait
    while True:
        try:
            order = control.receive(limit)
            limit = limits.SILENCE_LIMIT
            if order.get("do") == "end":
                return None
            if order.get("do") == "send":
                control.send(measure(str(order.get("to"))))
        except OSError as error:
            return in_words("probe_coordinator_left", error=error)
