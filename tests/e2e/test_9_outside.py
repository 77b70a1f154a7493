"""Who is not in the admin networks finds nothing: no TCP port answers, over IPv4 and IPv6."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab_cluster import ROOT, Cluster

STRANGER = "198.18.50.200/24"
EVERY_PORT = ["nmap", "-n", "-Pn", "-sS", "-p-", "--min-rate", "30000", "--max-retries", "2", "-oG", "-"]


def host(*words: str) -> str:
    done = subprocess.run(
        words, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def scanner() -> None:
    host(str(ROOT / "requirements/apt"), "nmap")


@contextmanager
def stranger() -> Iterator[list[str]]:
    """A machine on the lab's switch that belongs to nobody: the words that run a command there."""
    name = "aura-stranger"
    host("ip", "netns", "add", name)
    try:
        host("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        host("ip", "link", "set", name, "master", "auralab0", "up")
        host("ip", "-n", name, "address", "add", STRANGER, "dev", "eth0")
        host("ip", "-n", name, "link", "set", "eth0", "up")
        # IPv6 makes sure that nobody else has the link-local address before it may be used.
        host(
            "ip",
            "netns",
            "exec",
            name,
            "sh",
            "-c",
            "until ip -6 -o addr | grep fe80 | grep -vq tentative; do sleep 0.2; done",
        )
        yield ["ip", "netns", "exec", name]
    finally:
        host("ip", "netns", "delete", name)


def answering(listing: str) -> dict[int, str]:
    """Ports that gave any answer, by nmap's word for it (open, closed), from its listing for programs."""
    assert "Host: " in listing, listing
    told = {int(port): state for port, state in re.findall(r"(\d+)/(open|closed|unfiltered)/tcp", listing)}
    ignored = re.search(r"Ignored State: (\S+) \((\d+)\)", listing)
    assert ignored, f"nmap does not say what became of the other ports:\n{listing}"
    assert ignored[1] == "filtered", f"{ignored[2]} ports answered with {ignored[1]}"
    assert len(told) + int(ignored[2]) == 65535
    return told


@pytest.mark.parametrize("node", ["node0", "node3"])
def test_a_stranger_gets_no_answer_from_any_port(cluster: Cluster, node: str) -> None:
    address = {"node0": "198.18.50.20", "node3": "198.18.50.23"}[node]
    own = re.search(r"inet6 (fe80::[0-9a-f:]+)", cluster.sh(node, "ip -6 -o address show scope link"))
    assert own
    with stranger() as there:
        assert answering(host(*there, *EVERY_PORT, address)) == {}
        assert answering(host(*there, *EVERY_PORT, "-6", f"{own[1]}%eth0")) == {}


def test_the_controller_finds_ssh_and_nothing_else(cluster: Cluster) -> None:
    assert answering(host(*EVERY_PORT, "198.18.50.20")) == {22: "open", 6006: "closed"}
    assert answering(host(*EVERY_PORT, "198.18.50.23")) == {22: "open", 6006: "closed"}
