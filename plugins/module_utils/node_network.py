"""The network cards of this machine, and what netplan is told about them."""

from __future__ import annotations

import array
import contextlib
import fcntl
import glob
import json
import os
import re
import select
import socket
import struct
import time

from ansible.module_utils import node_files

SIOCETHTOOL = 0x8946
ETHTOOL_GPERMADDR = 0x20
ARP = 0x0806
IPV4 = 0x0800
# In netplan's own order: of files with the same name the first counts.
NETPLAN = ("/run/netplan", "/etc/netplan", "/usr/lib/netplan", "/lib/netplan")


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


def texts_of(pattern: str) -> dict[str, str]:
    """Whole: what cannot be read is no empty file."""
    found: dict[str, str] = {}
    for path in sorted(glob.glob(pattern)):
        with open(path, encoding="utf-8", errors="replace") as file:
            found[path] = file.read()
    return found


def netplan_files() -> dict[str, str]:
    found: dict[str, str] = {}
    for place in NETPLAN:
        # Where /lib is /usr/lib.
        if not place.startswith("/lib") or not os.path.islink(os.path.dirname(place)):
            found |= texts_of(f"{place}/*.yaml")
    return found


def netplan_originals() -> dict[str, str]:
    """What the role static_network has taken out of others' files, each as it was; oldest first."""
    return texts_of("/var/backups/aura/etc/netplan/*.yaml.*")


def owner(card: str, address: str) -> str:
    """MAC address of the other machine in the card's LAN that has the address, or "". Three questions, as one may get
    lost; about a second. They name no sender, as before a machine takes an address (RFC 5227), so that no table in the
    LAN is spoilt; whoever has the address answers, also who does not answer a ping.
    """
    own = {read(path) for path in glob.glob("/sys/class/net/*/address")}
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ARP)) as lan:
        lan.bind((card, ARP))
        mac = lan.getsockname()[4]
        frame = struct.pack("!6s6sH", b"\xff" * 6, mac, ARP)
        frame += struct.pack("!HHBBH6s4s6s4s", 1, IPV4, 6, 4, 1, mac, bytes(4), bytes(6), wanted)
        for _ in range(3):
            with contextlib.suppress(OSError):
                lan.send(frame)
            until = time.monotonic() + 0.4
            while select.select([lan], [], [], max(0.0, until - time.monotonic()))[0]:
                heard = lan.recv(2048)
                sender = heard[22:28].hex(":")
                if heard[28:32] == wanted and sender not in own:
                    return sender
    return ""


def owners(addresses: list[str], found: list[dict[str, object]]) -> dict[str, dict[str, str]]:
    """By address and card: who else has it in that card's LAN. Not asked for an address that this node has, nor for
    what is none: the role that asked will say so."""
    own = {str(one).partition("/")[0] for card in found for one in card["addresses"]}  # type: ignore[attr-defined]
    linked = [str(card["name"]) for card in found if card["kind"] == "ethernet" and card["carrier"]]
    return {
        address: {card: owner(card, address) for card in linked}
        for address in addresses
        if address not in own and is_address(address)
    }


def silent(name_servers: list[str]) -> list[str]:
    """Those at which no name server answers. Whatever it answers will do: a router without a way into the internet
    knows no names."""
    return [address for address in name_servers if not _answers(address)]


def _answers(address: str) -> bool:
    """Asks for the root's name servers, three times: a question may get lost."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    question = os.urandom(2) + b"\x01\x00\x00\x01" + bytes(6) + b"\x00\x00\x02\x00\x01"
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.settimeout(2)
        for _ in range(3):
            with contextlib.suppress(OSError):
                asking.connect((address, 53))
                asking.send(question)
                if asking.recv(4096)[:2] == question[:2]:
                    return True
    return False


def is_address(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, text)
    except OSError:
        return False
    return True


def of_ifupdown(found: list[dict[str, object]]) -> list[str]:
    """The cards that /etc/network/interfaces configures too."""
    paths = ["/etc/network/interfaces", *glob.glob("/etc/network/interfaces.d/*")]
    text = "\n".join(map(read, paths))
    names = [str(card["name"]) for card in found]
    return [name for name in names if re.search(rf"^\s*iface\s+{re.escape(name)}\s", text, re.MULTILINE)]
