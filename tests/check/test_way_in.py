"""Who moves the nodes to another network does not lose the way in: what the loaded firewall says to that."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tree
from expressions import says

NETWORKS = tree.plugin("filter/networks")
# As nft lists it (the set and the other chains shortened).
TABLE = """table inet aura {
	set visitors {
		type ipv4_addr
		flags timeout
		elements = { 192.168.60.9 timeout 10m }
	}

	chain input {
		type filter hook input priority filter; policy drop;
		tcp dport { 22, 6006 } jump admin
		tcp dport 22 ip saddr @visitors accept
		ip saddr { 192.168.50.20, 192.168.50.21 } accept
	}

	chain admin {
		ip saddr 192.168.50.0/24 accept
		ip saddr 10.1.2.3 accept
		ip6 saddr fd00::/64 accept
	}
}
"""
BOTH = TABLE.replace("ip saddr 10.1.2.3", "ip saddr 192.168.60.0/24")


def test_the_networks_of_a_loaded_table() -> None:
    assert NETWORKS.loaded_admin_networks(TABLE) == ["192.168.50.0/24", "10.1.2.3", "fd00::/64"]
    assert NETWORKS.loaded_admin_networks("") == []


def test_from_where_packets_leave() -> None:
    assert NETWORKS.route_source(route("192.168.60.9")) == "192.168.60.9"
    assert NETWORKS.route_source("") == ""  # RTNETLINK answers: Network is unreachable
    assert NETWORKS.route_source("[ ]") == ""


def route(source: str) -> str:
    return json.dumps([{"dst": "192.168.60.21", "dev": "enp3s0", "prefsrc": source}]) if source else ""


def node(
    there: str,
    now: str,
    table: str = TABLE,
    client: str = "192.168.50.9",
    here: str = "192.168.50.21",
    controller: str = "",
) -> dict[str, Any]:
    """node1, which shall move. there, now: from where this machine would come, and comes.

    controller: node0's new address, where that is the controller.
    """
    hosts: dict[str, dict[str, Any]] = {"node1": {"__static_network_own": client == here}}
    if controller:
        hosts["node0"] = {"__static_network_own": True, "__static_network_to": controller}
    return {
        "static_network_address": "192.168.60.21",
        "__static_network_seen": {"table": table, "session": {"client": client, "here": here, "port": 22}},
        "__static_network_routes": {"results": [{"stdout": route(there)}, {"stdout": route(now)}]},
        "__static_network_own": client == here,
        "ansible_play_hosts": list(hosts),
        "hostvars": hosts,
    }


@pytest.mark.parametrize(
    ("case", "shut_out"),
    [
        (node("192.168.60.9", "192.168.50.9"), True),  # the visitors' ten minutes are no way in
        (node("192.168.60.9", "192.168.50.9", table=BOTH), False),
        # Routed, and behind NAT: as it is seen now.
        (node("192.168.50.9", "192.168.50.9"), False),
        (node("10.0.2.15", "10.0.2.15"), False),
        (node("172.16.0.5", "172.16.0.5", client="172.16.0.5"), True),
        # No way there at all: the login beside the old address says so.
        (node("", "192.168.50.9"), False),
        # The controller is node0, which moves too; its route is still the old one.
        (node("192.168.50.20", "192.168.50.20", client="192.168.50.20", controller="192.168.60.20"), True),
        (
            node("192.168.50.20", "192.168.50.20", BOTH, "192.168.50.20", controller="192.168.60.20"),
            False,
        ),
        # This node is the controller itself: lo is always open.
        (node("192.168.60.9", "192.168.50.9", client="192.168.50.21"), False),
    ],
)
def test_who_would_be_shut_out_is_told_before(case: dict[str, Any], shut_out: bool) -> None:
    assert says("static_network", "__static_network_shut_out", **case) is shut_out
