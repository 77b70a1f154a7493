"""What a node's network lacks, and what stands in the way of it: beside test_lan_card.py, with the same PCs."""

import hashlib
import re
from typing import Any

import pytest
import tree
import yaml
from expressions import problems
from test_lan_card import OURS, SUBIQUITY, card, home, takeover, wifi

PLAN = tree.plugin("filter/network_plan")
SETTINGS: dict[str, Any] = OURS | {"interface": "", "first_address": "192.168.1.57"}
NONE = {"kind": "absent", "sha256": "", "mode": "", "owner": "", "group": ""}


def before(*cards: dict[str, Any]) -> dict[str, Any]:
    return {
        "cards": list(cards), "netplan": {}, "missing": ["netplan.io"], "distribution": "Ubuntu", "now": 0.0,
        "session": {"client": "192.168.50.9", "here": "192.168.50.20"}, "netplan_before": {},
        "owners": {}, "silent": [], "ifupdown": [],
        "files": {path: NONE for path in (PLAN.OURS, PLAN.CLOUD, PLAN.CLOUD_FILE)},
    }  # fmt: skip


def plan(*cards: dict[str, Any], found_at: str = "", **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = PLAN.network_plan(before(*cards) | more, SETTINGS, found_at)
    return found


def there(path: str, content: str, mode: str) -> dict[str, Any]:
    content_sum = hashlib.sha256(content.encode()).hexdigest()
    return {path: {"kind": "file", "sha256": content_sum, "mode": mode, "owner": "root", "group": "root"}}


NOTHING = {path: NONE for path in (PLAN.CLOUD, PLAN.CLOUD_FILE)}
READY = card("enp3s0", "192.168.50.20/24", gateway="192.168.50.1")
OTHER, SILENT = "02:a1:00:00:00:01", {"silent": ["9.9.9.9"]}


def test_a_node_that_has_all_of_it_is_left_alone() -> None:
    files = plan(READY)["files"]
    assert [file["path"] for file in files] == [PLAN.OURS]
    assert yaml.safe_load(files[0]["content"])["network"]["ethernets"]["0-aura"] == takeover({})["definition"]
    written = NOTHING | there(PLAN.OURS, files[0]["content"], "0600")
    assert not plan(READY, files=written)["differs"]
    debian = plan(READY, files=written, distribution="Debian")
    assert (debian["missing"], debian["differs"]) == (["netplan.io"], True)
    assert plan(READY, files=written | {PLAN.CLOUD: {"kind": "directory"}})["differs"]
    assert plan(READY, files=NOTHING | there(PLAN.OURS, files[0]["content"], "0644"))["differs"]
    assert "enp3s0 has nothing as its default route" in plan(READY | {"gateway": ""}, files=written)["why"]
    leased = READY | {"dynamic": ["192.168.50.20/24"]}
    assert "for good and nothing else" in plan(leased, files=written)["why"]


def test_others_files_are_kept_and_come_back() -> None:
    planned = plan(home(), netplan={"/etc/netplan/50-x.yaml": SUBIQUITY})
    kept, gone = planned["files"][1:]
    assert kept["path"].startswith("/var/backups/aura/etc/netplan/50-x.yaml.19")
    assert (kept["content"], gone) == (SUBIQUITY, {"path": "/etc/netplan/50-x.yaml", "absent": True})
    later = {kept["path"]: SUBIQUITY, kept["path"].replace(".19", ".20"): "of a later run"}
    files = {PLAN.OURS: {"kind": "file"}, PLAN.CLOUD_FILE: NONE}
    seen = {"files": files, "netplan_before": later, "netplan": {}}
    back = {file["path"]: file for file in PLAN.network_before(seen)}
    assert set(back) == {PLAN.OURS, "/etc/netplan/50-x.yaml", *later}
    assert back["/etc/netplan/50-x.yaml"]["content"] == SUBIQUITY
    assert all(back[path].get("absent") for path in (PLAN.OURS, *later))
    # What somebody has written into it since is kept.
    edited = {"path": f"{PLAN.EDITED}/etc/netplan/50-x.yaml", "content": "another card", "mode": "0600"}
    assert edited in PLAN.network_before(seen | {"netplan": {"/etc/netplan/50-x.yaml": "another card"}})


@pytest.mark.parametrize(
    ("state", "seen", "said"),
    [
        ({}, {"owners": {"192.168.50.20": {"enp3s0": OTHER}}}, f"answers there (hardware address {OTHER})"),
        ({"carrier": False}, {}, "no link at its LAN card enp3s0"),
        ({"carrier": False, "up": False}, {}, ""),  # its cable is not known yet
        ({}, {"owners": {"192.168.50.20": {"enp3s0": "", "enp9s0": OTHER}}}, ""),  # another LAN
        ({}, {"ifupdown": ["enp3s0"]}, "two masters"),
    ],
)
def test_what_stands_in_the_way_of_an_address(state: dict[str, Any], seen: dict[str, Any], said: str) -> None:
    nothing: dict[str, Any] = {"owners": {}, "ifupdown": []}
    answer = PLAN.address_problem("192.168.50.20", home() | state, nothing | seen)
    assert said in answer if said else answer == ""
    if "carrier" not in state:  # without a cable it would not even be the LAN's, unless somebody has named it
        assert plan(home(), **seen)["problems"] == [answer] * bool(said)


def test_an_address_that_was_lent_is_given_back_first() -> None:
    for manager, load in (("networkd", "netplan apply"), ("NetworkManager", "netplan generate")):
        lacks = plan(home(manager=manager))
        assert lacks["apply"][0][2].startswith("ip address delete 192.168.50.20/24 dev enp3s0 ")
        has = plan(card("enp3s0", "192.168.50.20/24", manager=manager))
        assert all(has[way][0][2].startswith(load) for way in ("apply", "undo"))


@pytest.mark.parametrize(
    ("found_at", "addresses", "before"),
    [
        ("192.168.1.57", ["192.168.1.57/24"], ""),
        # An interrupted run has lent the new address, and there the node was found. The undo takes it away.
        ("192.168.50.20", ["192.168.1.57/24", "192.168.50.20/24"], "192.168.1.57"),
        # The router's lease of the address itself: it comes back with the old settings.
        ("192.168.50.20", ["192.168.50.20/24"], ""),
    ],
)
def test_where_the_node_is_when_its_network_was_taken_back(
    found_at: str, addresses: list[str], before: str
) -> None:
    assert plan(card("enp3s0", *addresses), found_at=found_at)["before"] == before


def test_the_role_says_all_that_is_wrong() -> None:
    seen = {"cards": [wifi("192.168.50.20/24")], "netplan": {}}
    said = problems("static_network", seen, None, **OURS)
    assert "which is Wi-Fi" in said
    assert "static_network_enabled: false" in said


@pytest.mark.parametrize(
    ("gateway", "seen", "said"),
    [
        ("", {"owners": {"192.168.50.1": {"enp3s0": ""}}}, r"finds no router at 192.168.50.1 on enp3s0.*\."),
        ("", {"owners": {"192.168.50.1": {"enp3s0": OTHER}}} | SILENT, ""),
        ("192.168.50.1", SILENT, r"finds no name server at 9.9.9.9, .*"),
        ("192.168.50.254", SILENT, ""),
        ("192.168.50.1", {"ifupdown": ["enp3s0"]} | SILENT, r".*two masters.* finds no name server at 9.9.9.9, .*"),
    ],
)  # fmt: skip
def test_a_wrong_way_out_is_said_beforehand(gateway: str, seen: dict[str, Any], said: str) -> None:
    """A name server only where the way out is today what it shall be, and neither where nothing has to be done."""
    mine = card("enp3s0", "192.168.50.77/24", gateway=gateway)
    found = problems("static_network", before(mine) | seen, None, **SETTINGS)
    assert re.fullmatch(said, found), found
    without = before(mine | {"gateway": ""}) | SILENT
    assert problems("static_network", without, None, **SETTINGS | {"gateway": ""}) == ""
    files = NOTHING | there(PLAN.OURS, plan(READY)["files"][0]["content"], "0600")
    assert problems("static_network", before(READY) | SILENT | {"files": files}, None, **SETTINGS) == ""


def test_nobody_is_asked_for_what_is_no_address_or_what_the_node_has() -> None:
    network = tree.plugin("module_utils/node_network")
    mine = card("no-such-card", "192.168.50.20/24")
    assert network.owners(["192.168.50.300", "192.168.50.20"], [mine]) == {}
