"""The firewall's rules with a real kernel between two network namespaces, and what the role refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from expressions import preflight_sentences, says

# What a node answers: who is connected, its addresses, other firewalls, their chains.
SEEN: dict[str, Any] = {
    "client": "10.8.0.9",
    "here": "10.9.0.1",
    "port": 22,
    "addresses": ["10.9.0.1"],
    "other": [],
    "chains": [],
}
SETTINGS: dict[str, Any] = {
    "address": "10.9.0.1",
    "peers": ["10.9.0.1", "10.9.0.2"],
    "admin_networks": ["10.8.0.0/24"],
    "person": "",
}
TRAINING = Path(__file__).parents[2] / "training"
ELSEWHERE = {"client": "192.168.1.9", "here": "192.168.1.57", "addresses": ["192.168.1.57"]}


def problems(seen: dict[str, Any], **settings: Any) -> str:
    ssh = f"{seen['client']} 50000 {seen['here']} {seen['port']}"
    answers = {
        "__firewall_host": {"stdout_lines": [ssh, " ".join(seen["addresses"]), *seen["other"]]},
        "__firewall_chains": {"stdout_lines": seen["chains"]},
    }
    return preflight_sentences(
        "firewall", answers, **{f"firewall_{name}": value for name, value in settings.items()}
    )


RENTED = {"address_is_there": True}
OWN = {"client": "10.9.0.1", "here": "10.9.0.1"}  # the controller is this node
BARE = {"addresses": ["192.168.1.57"]}  # it has not moved yet


@pytest.mark.parametrize(
    ("seen", "settings", "sentences"),
    [
        ({}, {}, []),
        (BARE, {}, []),
        (ELSEWHERE, {}, []),  # the controller may come from elsewhere later
        ({"client": "192.168.1.9"}, {}, ["the firewall would lock you out"]),
        ({}, RENTED, []),
        ({}, RENTED | {"address": "203.0.113.7"},
         ["has the address 203.0.113.7 (lan_address). It has 10.9.0.1: name one", "public_address: 203.0.113.7"]),
        ({}, {"admin_networks": []}, ["firewall_admin_networks is empty"]),
        ({}, {"ssh_port": 2222}, ["Set firewall_ssh_port"]),
        ({}, {"ssh_port": 2222, "admin_ports": [8080]}, ["Set firewall_ssh_port"]),
        ({}, {"peers": ["node1"]},
         ["neither an address nor a network, as 192.168.50.0/24 with zeros at its end: node1"]),
        (OWN, {}, []),
        (OWN, {"person": "10.8.0.7"}, []),
        (OWN, {"person": "192.168.1.9"}, ["connected from 192.168.1.9"]),
        (OWN | BARE, {"person": "192.168.1.9"}, ["connected from 192.168.1.9"]),
        # From itself, whatever it is called, nobody is kept out; and sshd does not always know.
        *((OWN, {"person": person}, []) for person in ("127.0.0.1", "::1", "10.9.0.1", "UNKNOWN")),
        ({}, {"person": "192.168.1.9"}, []),  # on the other nodes it is the controller that counts
        ({"other": ["ufw", "firewalld"], "chains": ["ip filter INPUT"]}, {"peers": []},
         ["firewall_peers is empty", "sudo ufw disable", "disable --now firewalld"]),
        ({"chains": ["ip filter INPUT"]}, {}, ["since a packet has to pass both: ip filter INPUT"]),
        *(({}, {"lan_services": [service]}, []) for service in ("udp/5353", "tcp/47984-48010", "udp/20-25")),
        *(({}, {"lan_services": [f"tcp/{port}"]}, ["admin networks only"]) for port in ("22", "20-25")),
        *(({}, {"lan_services": [wrong]}, ["1 to 65535"]) for wrong in ("tcp/99999", "udp/0", "tcp/1-65536")),
        *(({}, {"lan_services": [wrong]}, [f"names {wrong}"]) for wrong in ("5353", "tcp/48010-47984")),
    ],
)  # fmt: skip
def test_what_would_lock_people_out_or_is_somebody_elses_is_refused(
    seen: dict[str, Any], settings: dict[str, Any], sentences: list[str]
) -> None:
    said = problems(SEEN | seen, **SETTINGS | settings)
    assert all(sentence in said for sentence in sentences), said
    assert sentences or said == ""
    assert "INPUT" not in said or not seen.get("other"), "the chain is ufw's"


# Two machines. `cables CARD:NETWORK…` joins them; $other is the other process, which also has 10.9.0.3 in the LAN.
TWO_MACHINES = """
set -e
other=$1
other() { nsenter --target "$1" --net "${@:2}"; }
cables() {
    ip link set lo up
    for card in "$@"; do
        name=${card%:*} network=${card#*:}
        ip link add $name type veth peer name p$name
        ip link set p$name netns $other
        ip address add $network.1/24 dev $name
        ip link set $name up
        other $other ip address add $network.2/24 dev p$name
        other $other ip link set p$name up
    done
    other $other ip link set lo up
    other $other ip address add 10.9.0.3/24 dev plan0
}
knock() {
    "${@:5}" timeout 5 python3 -c '
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[3])), 1, source_address=(sys.argv[2], 0))' $2 $3 $4 2>/dev/null &&
        echo "$1: in" || echo "$1: out"
}
# listen PORT [WORDS]: who knocks there gets in; WORDS (`nsenter …`): in which machine.
listen() {
    "${@:2}" python3 -c '
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
while True:
    server.accept()[0].close()' $1 &
    listeners="$listeners $!"
}
trap 'kill $listeners' EXIT
# wait_for WORDS: until that knock gets in, since who listens has to start first.
wait_for() {
    for second in 1 2 3 4 5 6 7 8 9 10; do
        [ "$("$@")" = "self: in" ] && break
        sleep 0.5
    done
}
# From the other machine, whether this one lives: it refuses a port where nobody listens, in place of silence.
answers() {
    other $3 "$PYTHON" -c '
import errno, socket, sys
probe = socket.socket()
probe.settimeout(2)
print(f"{sys.argv[1]}: {probe.connect_ex((sys.argv[2], 9)) in (0, errno.ECONNREFUSED)}")' $1 $2
}
"""
# $1: the other one's process, $2: the rules.
CABLES = """
cables lan0:10.9.0 home0:10.7.0 virbr0:10.6.0
# The peer's address comes in by the wrong card.
other $1 ip route add 10.7.0.1 dev phome0 src 10.9.0.2
sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.home0.rp_filter=0 2>/dev/null || true
nft -f "$2"
for port in 53 445 12355; do listen $port; done
for port in 53 12355; do wait_for knock self 10.9.0.1 10.9.0.1 $port; done
knock self 10.9.0.1 10.9.0.1 12355
knock peer 10.9.0.1 10.9.0.2 12355 other $1
knock stranger 10.7.0.1 10.7.0.2 12355 other $1
knock forged 10.7.0.1 10.9.0.2 12355 other $1
knock neighbour 10.9.0.1 10.9.0.3 445 other $1
knock stranger-there 10.7.0.1 10.7.0.2 445 other $1
knock virtual 10.6.0.1 10.6.0.2 12355 other $1
knock names 10.6.0.1 10.6.0.2 53 other $1
knock others-names 10.7.0.1 10.7.0.2 53 other $1
# What a new graphics card does at the next boot.
ip link set lan0 down
ip link set lan0 name enp9s0
ip link set enp9s0 up
knock renamed 10.9.0.1 10.9.0.2 12355 other $1
answers lives 10.9.0.1 $1
ip link set enp9s0 down
answers cut-off 10.9.0.1 $1
"""


def namespaces_work() -> bool:
    tools = all(map(shutil.which, ("nft", "ip", "nsenter", "unshare")))
    return tools and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


@pytest.mark.skipif(not namespaces_work(), reason="needs nft, and the right to make network namespaces")
def test_a_peer_comes_by_the_card_that_leads_to_it_whatever_its_name(tmp_path: Path) -> None:
    assert who_gets_in(tmp_path, CABLES, lan_network="10.9.0.0/24", lan_services=["tcp/445"]) == {
        "self": "in", "peer": "in", "renamed": "in", "stranger": "out", "forged": "out",
        "neighbour": "in", "stranger-there": "out", "virtual": "out", "names": "in", "others-names": "out",
        "lives": "True", "cut-off": "False",
    }  # fmt: skip


# aura0 stands for WireGuard's card: what comes by it has been proved to be the peer's.
OVERLAY = """
cables lan0:10.9.0 aura0:10.4.0
ip route add default via 10.9.0.2
sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.lan0.rp_filter=0 2>/dev/null || true
nft -f "$2"
for port in 2049 12355; do
    listen $port
    listen $port nsenter --target $1 --net
done
python3 -c '
import select, socket
ports = [socket.socket(type=socket.SOCK_DGRAM) for _ in range(3)]
for port, number in zip(ports, (123, 51820, 12355)):
    port.bind(("", number))
while True:
    for port in select.select(ports, [], [])[0]:
        port.sendto(*port.recvfrom(9))' & listeners="$listeners $!"
ask() {
    other $5 python3 -c '
import socket, sys
asks = socket.socket(type=socket.SOCK_DGRAM)
asks.settimeout(1)
asks.bind((sys.argv[2], 0))
asks.sendto(b"?", (sys.argv[1], int(sys.argv[3])))
asks.recvfrom(9)' $2 $3 $4 2>/dev/null && echo "$1: in" || echo "$1: out"
}
wait_for knock self 10.4.0.1 10.4.0.1 12355
wait_for ask self 10.4.0.1 10.4.0.2 12355 $1
wait_for knock self 10.9.0.2 10.9.0.2 2049 other $1
knock self 10.4.0.1 10.4.0.1 12355
knock peer 10.4.0.1 10.4.0.2 12355 other $1
knock to-a-peer 10.4.0.2 10.4.0.1 12355
answers lives 10.4.0.1 $1
for port in 2049 12355; do knock member-in-the-lan-$port 10.9.0.1 10.9.0.2 $port other $1; done
for port in 123 51820 12355; do ask member-in-the-lan-udp-$port 10.9.0.1 10.9.0.2 $port $1; done
for port in 123 51820; do ask neighbour-udp-$port 10.9.0.1 10.9.0.3 $port $1; done
# It has a peer's address for itself, and is the router: with the overlay up, and with none.
other $1 ip link set paura0 down
other $1 ip address add 10.4.0.2/32 dev lo
other $1 ip route add 10.4.0.1 via 10.9.0.1
knock forged 10.9.0.1 10.4.0.2 12355 other $1
ip link set aura0 down
knock forged-while-it-is-down 10.9.0.1 10.4.0.2 12355 other $1
knock to-a-false-peer-while-it-is-down 10.4.0.2 10.9.0.1 2049
knock to-the-lan 10.9.0.2 10.9.0.1 2049
"""


@pytest.mark.skipif(not namespaces_work(), reason="needs nft, and the right to make network namespaces")
def test_with_an_overlay_a_peer_comes_and_is_reached_by_its_card_alone(tmp_path: Path) -> None:
    assert who_gets_in(
        tmp_path, OVERLAY, peers=["10.4.0.1", "10.4.0.2"], peer_interface="aura0", members=["10.9.0.1", "10.9.0.2"],
        member_services=["udp/123", "udp/51820"],
    ) == {
        "self": "in", "peer": "in", "to-a-peer": "in", "lives": "True",
        "member-in-the-lan-2049": "out", "member-in-the-lan-12355": "out", "member-in-the-lan-udp-12355": "out",
        "member-in-the-lan-udp-123": "in", "member-in-the-lan-udp-51820": "in",
        "neighbour-udp-123": "out", "neighbour-udp-51820": "out",
        "forged": "out", "forged-while-it-is-down": "out", "to-a-false-peer-while-it-is-down": "out",
        "to-the-lan": "in",
    }  # fmt: skip


def who_gets_in(tmp_path: Path, cables: str, **settings: Any) -> dict[str, str]:
    """What the script says of each who knocks, under the role's rules."""
    rules = tmp_path / "rules.nft"
    variables = {f"firewall_{name}": value for name, value in {**SETTINGS, **settings}.items()}
    rules.write_text(says("firewall", "lookup('template', 'aura-firewall.nft.j2')", **variables))
    script = tmp_path / "cables"
    script.write_text(TWO_MACHINES + cables)
    other = subprocess.Popen(["unshare", "--net", "sleep", "120"])
    try:
        for _ in range(100):  # until it has its own network
            if Path(f"/proc/{other.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink():
                break
            time.sleep(0.05)
        done = subprocess.run(
            ["unshare", "--net", "bash", script, str(other.pid), rules],
            capture_output=True, text=True, timeout=60, check=False,
            env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(TRAINING)},
        )  # fmt: skip
    finally:
        other.kill()
        other.wait()
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ") for line in done.stdout.splitlines())
