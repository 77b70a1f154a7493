"""An address is lent beside the others of a card, and never taken from who has it for longer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tree

FOR_EVER = 4294967295
WANTED = "192.168.50.20"


class Node:
    """Answers as the node's `ip` does, and keeps what it was told to change."""

    def __init__(self, *lives: tuple[str, int]) -> None:
        self.changes: list[list[str]] = []
        entries = [
            {"family": "inet", "local": address, "prefixlen": 24, "valid_life_time": life}
            | ({"dynamic": True} if life < FOR_EVER else {})
            for address, life in lives
        ]
        self.said = json.dumps([{"ifname": "enp3s0", "addr_info": entries}])

    def run_command(self, words: list[str], **_: Any) -> tuple[int, str, str]:
        if "show" in words:
            return 0, self.said, ""
        self.changes.append(words)
        return 0, "", ""


@pytest.mark.parametrize(
    ("lives", "lent"),
    [
        ([], True),
        ([("192.168.50.131", 86400)], True),  # the lease of another address
        ([(WANTED, 86400)], False),  # the router's lease of this one: an interrupted run must not end it
        ([(WANTED, 600)], False),
        ([(WANTED, FOR_EVER)], False),
        ([(WANTED, 120)], True),  # lent by a run that was interrupted
    ],
)
def test_a_life_is_made_longer_and_never_shorter(lives: list[tuple[str, int]], lent: bool) -> None:
    node = Node(*lives)
    assert tree.plugin("modules/lan_address").lend(node, "enp3s0", WANTED, 24) is lent
    life = ["valid_lft", "600", "preferred_lft", "600"]
    replace = ["ip", "address", "replace", f"{WANTED}/24", "dev", "enp3s0", *life]
    assert node.changes == ([replace] if lent else [])
