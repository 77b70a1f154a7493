"""Who moves the nodes to another network does not lose the way in: what the loaded firewall says to that."""

import json

import pytest
import tree

PLAN = tree.plugin("filter/network_plan")
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
CLIENT = "192.168.50.9"


def test_the_networks_of_a_loaded_table() -> None:
    assert PLAN.loaded_admin_networks(TABLE) == ["192.168.50.0/24", "10.1.2.3", "fd00::/64"]
    assert PLAN.loaded_admin_networks("") == []
    assert PLAN.shut_out("fe80::1%eth0", TABLE)
    assert not PLAN.shut_out("fd00::1%eth0", TABLE)


def test_from_where_packets_leave() -> None:
    assert PLAN.route_source(route("192.168.60.9")) == "192.168.60.9"
    assert PLAN.route_source("") == ""  # RTNETLINK answers: Network is unreachable
    assert PLAN.route_source("[ ]") == ""


def route(source: str) -> str:
    return json.dumps([{"dst": "192.168.60.21", "dev": "enp3s0", "prefsrc": source}]) if source else ""


@pytest.mark.parametrize(
    ("there", "now", "table", "client", "controller", "shut_out"),
    [
        ("192.168.60.9", "192.168.50.9", TABLE, CLIENT, "", True),  # the visitors' ten minutes are no way in
        ("192.168.60.9", "192.168.50.9", BOTH, CLIENT, "", False),
        # Routed, and behind NAT: as it is seen now.
        ("192.168.50.9", "192.168.50.9", TABLE, CLIENT, "", False),
        ("10.0.2.15", "10.0.2.15", TABLE, CLIENT, "", False),
        ("172.16.0.5", "172.16.0.5", TABLE, "172.16.0.5", "", True),
        # No way there at all: the login beside the old address says so.
        ("", "192.168.50.9", TABLE, CLIENT, "", False),
        # The controller is node0, which moves too; its route is still the old one.
        ("192.168.50.20", "192.168.50.20", TABLE, "192.168.50.20", "192.168.60.20", True),
        ("192.168.50.20", "192.168.50.20", BOTH, "192.168.50.20", "192.168.60.20", False),
    ],
)  # fmt: skip
def test_who_would_be_shut_out_is_told_before(
    there: str, now: str, table: str, client: str, controller: str, shut_out: bool
) -> None:
    comes_from = PLAN.comes_from({"own": False}, client, [route(there), route(now)], controller)
    assert PLAN.shut_out(comes_from, table) is shut_out


def test_a_controller_that_is_this_node_is_always_let_in() -> None:
    """lo is always open."""
    assert PLAN.comes_from({"own": True}, "192.168.50.21", [route("192.168.60.9"), ""], "") == ""


def test_the_controllers_own_node_is_the_last_and_another_one_proves_it() -> None:
    plans = {
        "node0": {"differs": True, "own": True}, "node1": {"differs": False, "own": False},
        "node2": {"differs": True, "own": False}, "node3": {"differs": True, "own": False}, "node4": {},
    }  # fmt: skip
    turns = {name: PLAN.network_turn(plans, name) for name in plans}
    assert [turn["turn"] for turn in turns.values()] == ["last", "", "first", "rest", ""]
    assert [turn["peer"] for turn in turns.values()] == ["node2", "node2", "node0", "node2", "node2"]
    assert {turn["controller"] for turn in turns.values()} == {"node0"}
    alone = {"turn": "first", "peer": "", "controller": ""}
    assert PLAN.network_turn({"node1": plans["node2"]}, "node1") == alone


PLANNED = {"to": "192.168.60.21", "network": "192.168.60.0/24", "card": {"name": "enp3s0"}}
WELL, NOT = {"rc": 0}, {"rc": 255, "stderr_lines": ["ssh: timed out"]}


@pytest.mark.parametrize(
    ("direct", "through", "peer", "said"),
    [
        (WELL, WELL, "node2", ""),
        ({"skipped": True}, WELL, "node2", ""),  # the controller's own node
        (WELL, {"skipped": True}, "", ""),  # the only node
        (NOT, NOT, "node2", "for this machine nor for node2 (ssh: timed out). Does the cable of enp3s0"),
        (NOT, WELL, "node2", "for this machine (ssh: timed out). This machine needs a way into 192.168.60.0/24"),
        (NOT, {"skipped": True}, "", "This machine needs a way into 192.168.60.0/24"),
        (WELL, NOT, "node2", "at 192.168.60.21 for node2 (ssh: timed out). Does the cable"),
    ],
)  # fmt: skip
def test_who_does_not_get_there_is_told_what_to_do(
    direct: dict[str, object], through: dict[str, object], peer: str, said: str
) -> None:
    answer = PLAN.login_problem(PLANNED, direct, through, peer)
    assert said in answer if said else answer == ""
