"""The firewall's rules with a real kernel between two network namespaces, and what the role refuses."""

from __future__ import annotations

from typing import Any

import pytest
from expressions import preflight_sentences

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
