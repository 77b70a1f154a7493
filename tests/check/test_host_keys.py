"""Which host keys bootstrap takes, before a password is sent."""

from __future__ import annotations

import subprocess

import pytest
import tree

KEYS = tree.plugin("action/host_keys")
ONE = KEYS.Key("node0", "192.168.50.30", "ssh-ed25519", "AAAA")
TWO = KEYS.Key("node1", "192.168.50.31", "ssh-ed25519", "AAAB")
NOT_TOLD = f"node1 (192.168.50.31) shows {TWO.fingerprint}, which is not in host_keys."


@pytest.fixture
def keyscan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has an RSA key only."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        said = "# 10.0.0.3:2222 SSH-2.0-x\n" + ("[10.0.0.3]:2222 ssh-rsa AAAA\n" if "rsa" in command else "")
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", run)


def test_the_key_is_recorded_under_the_nodes_name(keyscan: None) -> None:
    key = KEYS.Key("node3", "10.0.0.3", *KEYS.ssh_host_key("10.0.0.3", 2222))
    assert key.line == "node3 ssh-rsa AAAA\n"
    assert key.fingerprint in KEYS.table([key])


@pytest.mark.parametrize(
    ("recorded", "told", "says"),
    [
        ("", None, []),
        ("node9 ssh-ed25519 AAAZ\n", f"256 {ONE.fingerprint} root@a (ED25519)\n{TWO.line}", []),
        ("", f"256 {ONE.fingerprint} root@a", [NOT_TOLD, "What is a PC's own says, at its own keyboard:"]),
        ("node9 ssh-ed25519 AAAB\n", None, ["node1 (192.168.50.31) shows the same host key as node9: one disk"]),
    ],
)  # fmt: skip
def test_what_stops_bootstrap(recorded: str, told: str | None, says: list[str]) -> None:
    found = KEYS.problems([ONE, TWO], recorded, told)
    assert len(found) == len(says)
    assert all(sentence.startswith(start) for sentence, start in zip(found, says, strict=True))
