"""Which host keys bootstrap takes, before a password is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import tree

KEYS = tree.plugin("action/host_keys")
ONE = KEYS.Key("node0", "192.168.50.30", "ssh-ed25519", "AAAA")
TWO = KEYS.Key("node1", "192.168.50.31", "ssh-ed25519", "AAAB")
NOT_TOLD = f"node1 (192.168.50.31) shows {TWO.fingerprint}, which is not in host_keys."


@pytest.mark.parametrize(
    ("recorded", "told", "says"),
    [
        ("", None, []),
        ("node9 ssh-ed25519 AAAZ\n", f"256 {ONE.fingerprint} root@a (ED25519)\n{TWO.line}", []),
        ("", f"256 {ONE.fingerprint} root@a", [NOT_TOLD, "What is a PC's own says, at its own keyboard:"]),
        ("node2 ssh-ed25519 AAAB\n", None, ["node1 (192.168.50.31) shows the same host key as node2: one disk"]),
        (
            "node9 ssh-ed25519 AAAB\n", None,
            ["node1 (192.168.50.31) shows the host key of node9, which is no node any more. If you have renamed it: "
             "ssh-keygen -R node9 -f known_hosts, and this again."],
        ),
    ],
)  # fmt: skip
def test_what_stops_bootstrap(recorded: str, told: str | None, says: list[str]) -> None:
    found = KEYS.problems([ONE, TWO], recorded, told, ["node0", "node1", "node2"], Path("known_hosts"))
    assert len(found) == len(says)
    assert all(sentence.startswith(start) for sentence, start in zip(found, says, strict=True))
