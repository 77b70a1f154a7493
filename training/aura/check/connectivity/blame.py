"""Which node, cable or direction explains a set of bad pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aura.check.connectivity.evidence import Pair


@dataclass(frozen=True)
class Blame:
    """What a set of bad pairs has in common. kind: all, node, into, out of, both ways, one way."""

    kind: str
    nodes: tuple[str, ...]
    pairs: frozenset[Pair]

    @property
    def subject(self) -> str:
        if self.kind == "all":
            return "all"
        return {"one way": " -> ", "both ways": " <-> "}.get(self.kind, "").join(self.nodes)


def blame(measured: set[Pair], bad: set[Pair]) -> list[Blame]:
    """The fewest culprits for the bad pairs: everything; a node (all of its pairs); a node's incoming or outgoing
    half; a pair; one direction of a pair. What one culprit explains is no evidence against another."""
    names = sorted({name for pair in measured for name in pair})
    if len(names) > 2 and measured and bad == measured:
        return [Blame("all", tuple(names), frozenset(bad))]
    found: list[Blame] = []
    unexplained = set(bad)
    clear = set(measured)  # pairs that no culprit explains yet
    shapes: list[tuple[str, Callable[[Pair, str], bool]]] = [
        ("node", lambda pair, name: name in pair),
        ("into", lambda pair, name: pair[1] == name),
        ("out of", lambda pair, name: pair[0] == name),
    ]
    for kind, belongs in shapes:
        by_badness = sorted(names, key=lambda name: -sum(belongs(pair, name) for pair in unexplained))
        for name in by_badness if len(names) > 2 else []:
            mine = {pair for pair in clear if belongs(pair, name)}
            peers = {other for pair in mine for other in pair if other != name}
            if len(peers) > 1 and mine <= unexplained:
                found.append(Blame(kind, (name,), frozenset(mine)))
                unexplained -= mine
                clear -= mine
    for caller, called in sorted(unexplained):
        if (called, caller) not in unexplained:
            found.append(Blame("one way", (caller, called), frozenset({(caller, called)})))
        elif caller < called:
            pairs = frozenset({(caller, called), (called, caller)})
            found.append(Blame("both ways", (caller, called), pairs))
    return found
