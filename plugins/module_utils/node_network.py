"""The network cards of this machine."""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import struct

from ansible.module_utils import node_files

SIOCETHTOOL = 0x8946
ETHTOOL_GPERMADDR = 0x20


def read(path: str) -> str:
    return node_files.read(path).strip()


def permanent_mac(name: str) -> str:
    """The address that the card was made with, whatever it is called or told now; empty where there is none (veth)."""
    answer = array.array("B", struct.pack("II32x", ETHTOOL_GPERMADDR, 32))
    request = struct.pack("16sP", name.encode(), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)
        except OSError:
            return ""
    mac = answer[8:14].tobytes()
    return ":".join(f"{byte:02x}" for byte in mac) if any(mac) else ""


def kind(link: dict[str, object]) -> str:
    """ethernet, wifi, or virtual (bridges, tunnels, the host's end of a container's cable)."""
    place = f"/sys/class/net/{link['ifname']}"
    if os.path.exists(f"{place}/wireless") or os.path.exists(f"{place}/phy80211"):
        return "wifi"
    made_by = link.get("linkinfo", {})
    made_by = made_by.get("info_kind", "") if isinstance(made_by, dict) else ""
    # In a container the card is one end of a veth, and belongs to no bridge there.
    own = link.get("link_type") == "ether" and (os.path.exists(f"{place}/device") or made_by == "veth")
    return "ethernet" if own and "master" not in link else "virtual"


def managers(nm_devices: str) -> set[str]:
    """The cards that NetworkManager has in its hands (from `nmcli --terse --fields DEVICE,STATE device`)."""
    pairs = [line.rsplit(":", 1) for line in nm_devices.splitlines() if ":" in line]
    return {
        name.replace("\\:", ":")
        for name, state in pairs
        if not state.startswith(("unmanaged", "unavailable"))
    }


def networkd_manages(index: object) -> bool:
    state = read(f"/run/systemd/netif/links/{index}")
    return "ADMIN_STATE=" in state and "ADMIN_STATE=unmanaged" not in state


def cards(addresses: str, routes: str, nm_devices: str) -> list[dict[str, object]]:
    """All links but lo, from the JSON of `ip -details address` and of `ip -4 route show default`."""
    gateways = {route.get("dev"): route.get("gateway", "") for route in reversed(json.loads(routes or "[]"))}
    of_nm = managers(nm_devices)
    found = []
    for link in json.loads(addresses or "[]"):
        name = link.get("ifname", "")
        if not name or name == "lo":
            continue
        of_link = [entry for entry in link.get("addr_info", []) if entry.get("local")]
        manager = (
            "NetworkManager"
            if name in of_nm
            else "networkd"
            if networkd_manages(link.get("ifindex"))
            else "none"
        )
        found.append({
            "name": name,
            "mac": link.get("address", ""),
            "permanent_mac": permanent_mac(name),
            "kind": kind(link),
            "up": "UP" in link.get("flags", []),
            "carrier": "LOWER_UP" in link.get("flags", []),
            "addresses": [f"{entry['local']}/{entry['prefixlen']}" for entry in of_link],
            "dynamic": [f"{entry['local']}/{entry['prefixlen']}" for entry in of_link if entry.get("dynamic")],
            "gateway": gateways.get(name, ""),
            "manager": manager,
        })  # fmt: skip
    return found
