"""The overlay: which address a node has in it, whose key goes into root's settings, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import problems, says
from plays import told

OVERLAY = tree.plugin("filter/overlay")
KEY = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg="
NAMES = ["node0", "node1"]
LAN = {"node0": "192.168.50.20", "node1": "192.168.50.21"}
ADDRESSES = {"node0": "10.201.0.20", "node1": "10.201.0.21"}
SETTINGS: dict[str, Any] = {"addresses": ADDRESSES, "endpoints": LAN}
SEEN: dict[str, Any] = {
    "modules": {"wireguard": True},
    "session": {"client": "192.168.50.9", "here": "192.168.50.20", "port": 22},
    "cards": [
        {"name": "enp3s0", "addresses": ["192.168.50.20/24", "fe80::1%enp3s0/64"]},
        {"name": "aura0", "addresses": ["10.201.0.20/24"]},
    ],
}
FROM_WITHIN = SEEN["session"] | {"client": "10.201.0.5"}


@pytest.mark.parametrize(
    ("address", "prefix", "network", "wanted"),
    [
        ("192.168.50.20", 24, "10.201.0.0/16", "10.201.0.20"),
        ("172.16.5.9", 16, "10.201.0.0/16", "10.201.5.9"),
        ("192.168.50.20", "24", "10.99.7.0/24", "10.99.7.20"),
        ("192.168.50.20", 16, "10.99.7.0/24", ""),
        ("192.168.50.20", 24, "10.99.7.1/24", ""),
        ("what", 24, "10.201.0.0/16", ""),
    ],
)
def test_a_node_keeps_its_number(address: str, prefix: int | str, network: str, wanted: str) -> None:
    assert OVERLAY.overlay_address(address, prefix, network) == wanted


def test_what_is_no_key_never_gets_into_the_settings_of_others() -> None:
    assert OVERLAY.overlay_key(f" {KEY}\n") == KEY
    for text in ("", "key", KEY[:-1], f"{KEY}\nPostUp = touch /root/in", f"[{KEY}", f"{KEY[:-2]}h="):
        assert OVERLAY.overlay_key(text) == ""


def test_each_node_knows_all_others_whose_key_is_known(tmp_path: Path) -> None:
    (tmp_path / "node0.pub").write_text(f"{KEY}\n")
    (tmp_path / "node2.pub").write_text(f"{KEY}\nPostUp = touch /root/in\n")
    settings = {
        "overlay_addresses": {**ADDRESSES, "node2": "10.201.0.22", "node3": "10.201.0.23"},
        "overlay_endpoints": {**LAN, "node2": "192.168.50.22", "node3": "192.168.50.23"},
        "overlay_state": str(tmp_path),
    }
    assert says("overlay", "lookup('template', 'overlay.conf.j2')", **settings) == (
        "# Written by Ansible (role overlay); changes are overwritten.\n"
        "[Interface]\n"
        "Address = 10.201.0.21/24\n"
        "ListenPort = 51820\n"
        "# Who was started anew speaks first, with its key: else the others talk into the old session for 15 s.\n"
        f"PostUp = wg set %i private-key /etc/wireguard/aura0.key peer {KEY} persistent-keepalive 25\n"
        "\n"
        "# node0\n"
        "[Peer]\n"
        f"PublicKey = {KEY}\n"
        "AllowedIPs = 10.201.0.20/32\n"
        "Endpoint = 192.168.50.20:51820\n"
    )


@pytest.mark.parametrize(
    ("settings", "seen", "said"),
    [
        ({}, {}, ""),
        ({}, {"modules": {"wireguard": False}}, "its kernel has no module wireguard"),
        ({"strangers": ["node4"]}, {}, "node4 is none"),
        ({"network": "10.201.0.1/16"}, {}, "10.201.0.1/16, which is no network"),
        ({"network": "10.201.0.0/28"}, {}, "no room for a LAN of /24"),
        ({"port": 0}, {}, "overlay_port is 0"),
        ({"endpoints": {"node0": "10.201.0.20"}}, {}, "10.201.0.0/24, which is in use: the LAN has 10.201.0.0/24"),
        ({}, {"cards": [{"name": "vpn0", "addresses": ["10.0.0.5/8"]}]}, "in use: its card vpn0 has 10.0.0.0/8"),
        ({}, {"session": FROM_WITHIN}, "in use: the machine that you come from has 10.201.0.5/32"),
    ],
)  # fmt: skip
def test_what_is_refused(settings: dict[str, Any], seen: dict[str, Any], said: str) -> None:
    found = problems("overlay", SEEN | seen, **SETTINGS | settings)
    assert said in found if said else found == ""


SAYS = {
    "trainer_link_mbit": (1000, 946),
    "peer_address": ("192.168.50.20", "10.201.0.20"),
    "hostname_addresses": (LAN, ADDRESSES),
    "notify_nodes": (LAN, ADDRESSES),
    "trainer_address": ("192.168.50.20", "10.201.0.20"),
    "nfs_clients": (["192.168.50.21"], ["10.201.0.21"]),
    "nfs_source": ("192.168.50.20:/srv/aura", "10.201.0.20:/srv/aura"),
    "firewall_address": ("192.168.50.20", "192.168.50.20"),
    "firewall_peers": (list(LAN.values()), list(ADDRESSES.values())),
    "firewall_peer_interface": ("", "aura0"),
    "firewall_members": ([], list(LAN.values())),
    "timesync_peers": (list(LAN.values())[1:], list(LAN.values())[1:]),
    "timesync_clients": (list(LAN.values()), list(LAN.values())),
    "ansible_host": ("192.168.50.20", "192.168.50.20"),
    "overlay_strangers": ([], []),
}


@pytest.mark.parametrize("overlay", [False, True])
def test_one_setting_moves_all_but_the_time_and_the_controller(tmp_path: Path, overlay: bool) -> None:
    hosts = {name: {"lan_address": address} for name, address in LAN.items()}
    more = {"lan_prefix": 24, "overlay": overlay, "webhooks": ["x"]}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": hosts, "vars": more}}))
    wanted = {name: values[overlay] for name, values in SAYS.items()}
    assert told(tmp_path, "node0", *SAYS) == wanted
