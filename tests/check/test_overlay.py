"""The overlay: which address a node has in it, and whose key goes into root's settings."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from expressions import says
from plays import told

KEY = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg="
LAN = {"node0": "192.168.50.20", "node1": "192.168.50.21"}
ADDRESSES = {"node0": "10.201.0.20", "node1": "10.201.0.21"}


def test_only_a_key_gets_into_the_settings_of_other_nodes(tmp_path: Path) -> None:
    (tmp_path / "node0.pub").write_text(f"{KEY}\n")
    for number, text in enumerate(("", "key", KEY[:-1], f"{KEY}\nPostUp = id", f"[{KEY}", f"{KEY[:-2]}h=")):
        (tmp_path / f"bad{number}.pub").write_text(text)
    addresses = {path.stem: "10.201.0.20" for path in tmp_path.glob("*.pub")} | ADDRESSES
    settings = {"overlay_addresses": addresses, "overlay_endpoints": addresses | LAN}
    text = says("overlay", "lookup('template', 'overlay.conf.j2')", overlay_state=str(tmp_path), **settings)
    assert text == (
        "# Managed by Ansible (role overlay).\n"
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


def variables(place: Path, lan: dict[str, str], *names: str, **more: Any) -> dict[str, Any]:
    """What these variables are for the first node of an inventory."""
    hosts = {name: {"lan_address": address} for name, address in lan.items()}
    (place / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": hosts, "vars": more}}))
    return told(place, next(iter(lan)), *names)


@pytest.mark.parametrize(
    ("address", "prefix", "network", "wanted"),
    [
        ("172.16.5.9", 16, "10.201.0.0/16", "10.201.5.9"),
        ("192.168.50.20", "24", "10.99.7.0/24", "10.99.7.20"),
    ],
)
def test_a_node_keeps_its_number(
    tmp_path: Path, address: str, prefix: int | str, network: str, wanted: str
) -> None:
    settings = {"lan_prefix": prefix, "overlay": True, "overlay_network": network}
    assert variables(tmp_path, {"node0": address}, "peer_address", **settings) == {"peer_address": wanted}
