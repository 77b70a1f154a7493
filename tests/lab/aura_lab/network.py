"""The lab's switch: a bridge, shaped links, DHCP as a router gives it, and NAT to the outside.

Everything has the lab's own name (auralab0, al-*, table ip auralab), so that it can be removed by name.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_lab import host

if TYPE_CHECKING:
    from aura_lab.node import Node

BRIDGE = "auralab0"
NETWORK = ipaddress.IPv4Network("198.18.50.0/24")
HOST_ADDRESS = "198.18.50.1"
TABLE = ("ip", "auralab")
# The guide's LS1005G: gigabit ports.
FULL_RATE = "1gbit"
_RULES = f"""
table ip auralab {{
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {NETWORK} oifname != "{BRIDGE}" masquerade
    }}
    chain forward {{
        type filter hook forward priority filter; policy accept;
        oifname != "{BRIDGE}" iifname "{BRIDGE}" tcp flags syn tcp option maxseg size set rt mtu
        iifname != "{BRIDGE}" oifname "{BRIDGE}" tcp flags syn tcp option maxseg size set rt mtu
    }}
}}
"""
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_HOSTS = host.OWN / "dhcp-hosts"


def link_name(node: str) -> str:
    """The host's end of a node's cable (at most 15 characters)."""
    return f"al-{node}" if len(node) <= 12 else f"al-{hashlib.sha256(node.encode()).hexdigest()[:12]}"


def mac(address: str) -> str:
    """A node's hardware address: always the same for the same first address."""
    return "02:a1:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def nameservers() -> list[str]:
    """The resolvers of this machine that a node can reach; without one, the lab's own forwarder."""
    found = []
    for path in (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf")):
        if path.exists():
            found += re.findall(r"^nameserver\s+(\d+\.\d+\.\d+\.\d+)", path.read_text(), re.MULTILINE)
    usable = list(
        dict.fromkeys(address for address in found if not ipaddress.ip_address(address).is_loopback)
    )
    return usable or [HOST_ADDRESS]


def exists(link: str = BRIDGE) -> bool:
    return link in [name for _, name in socket.if_nameindex()]


def up() -> None:
    """Bring up the bridge, NAT and DHCP."""
    if not exists():
        taken = [
            route["dst"] for route in json.loads(host.run("ip", "-j", "route", "show", "root", str(NETWORK)))
        ]
        if taken:
            raise host.LabError(
                f"This machine already has a route to {taken[0]}, which the lab needs for itself."
            )
        host.run("ip", "link", "add", BRIDGE, "type", "bridge", "forward_delay", "0")
    host.run("ip", "address", "replace", f"{HOST_ADDRESS}/{NETWORK.prefixlen}", "dev", BRIDGE)
    host.run("ip", "link", "set", BRIDGE, "up")
    host.run("nft", "-f", "-", stdin=f"table ip auralab\ndelete table ip auralab\n{_RULES}")
    _FORWARDING.write_text("1")
    for rule in _iptables_rules():
        if not host.succeeds("iptables", "-w", "-C", *rule):
            host.run("iptables", "-w", "-I", *rule)
    _start_dhcp()


def remember(memory: dict[str, Any]) -> None:
    """Note what this machine was like before the lab; to be saved before `up` changes it."""
    memory.setdefault("ip_forward", _FORWARDING.read_text().strip())


def down(memory: dict[str, Any]) -> None:
    _end_ssh_masters()
    for dhcp in host.processes_with(f"--dhcp-hostsfile={_HOSTS}"):
        dhcp.kill(signal.SIGTERM)
    if exists():
        host.run("ip", "link", "delete", BRIDGE)
    if shutil.which("nft") and host.succeeds("nft", "list", "table", *TABLE):
        host.run("nft", "delete", "table", *TABLE)
    for rule in _lab_rules():
        while shutil.which("iptables") and host.succeeds("iptables", "-w", "-D", *rule):
            pass
    if "ip_forward" in memory:
        _FORWARDING.write_text(memory["ip_forward"])


def _lab_rules() -> list[list[str]]:
    comment = ["-m", "comment", "--comment", "aura-lab", "-j", "ACCEPT"]
    return [
        ["FORWARD", "-i", BRIDGE, *comment],
        ["FORWARD", "-o", BRIDGE, *comment],
        ["INPUT", "-i", BRIDGE, *comment],
    ]


def _iptables_rules() -> list[list[str]]:
    """Where Docker or ufw made DROP the policy, the lab's traffic needs a rule that lets it pass."""
    if not shutil.which("iptables"):
        return []
    chains = [
        c for c in ("FORWARD", "INPUT") if f"-P {c} DROP" in host.run("iptables", "-w", "-S", c, check=False)
    ]
    return [rule for rule in _lab_rules() if rule[0] in chains]


# --- DHCP ------------------------------------------------------------------------------------------


def _start_dhcp() -> None:
    if host.processes_with(f"--dhcp-hostsfile={_HOSTS}"):
        return
    _HOSTS.touch()
    servers = nameservers()
    command = [
        "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=",
        f"--interface={BRIDGE}", "--except-interface=lo", "--bind-interfaces",
        f"--dhcp-range={NETWORK.network_address},static,{NETWORK.netmask},12h",
        f"--dhcp-option=option:router,{HOST_ADDRESS}", f"--dhcp-option=option:dns-server,{','.join(servers)}",
        f"--dhcp-hostsfile={_HOSTS}", f"--dhcp-leasefile={host.OWN}/dhcp-leases", "--dhcp-authoritative",
        "--no-ping", "--dhcp-ignore-names", "--log-facility=-",
    ]  # fmt: skip
    if servers != [HOST_ADDRESS]:
        command.append("--port=0")
    log = host.OWN / "dhcp.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        return
    raise host.LabError(f"The lab's DHCP server does not start: {log.read_text().strip()}")


def lease(addresses: Iterable[str]) -> None:
    """Give these addresses (and only these) to the nodes that they belong to."""
    host.write(_HOSTS, "".join(f"{mac(address)},{address}\n" for address in addresses))
    for dhcp in host.processes_with(f"--dhcp-hostsfile={_HOSTS}"):
        os.kill(dhcp.pid, signal.SIGHUP)


# --- links -----------------------------------------------------------------------------------------


def plug(node: Node, leader: int) -> None:
    """A cable from the bridge to a network card in the node's network namespace."""
    link = link_name(node.name)
    unplug(node.name)
    peer = ["peer", "name", node.nic, "address", mac(node.address), "netns", str(leader)]
    host.run("ip", "link", "add", link, "type", "veth", *peer)
    host.run("ip", "link", "set", link, "master", BRIDGE)
    shape(node, leader)
    if not node.cut:
        set_cable(node.name, connected=True)


def unplug(node: str) -> None:
    link = link_name(node)
    # When a node has just ended, its namespace may take the cable along before we do.
    if exists(link) and not host.succeeds("ip", "link", "delete", link) and exists(link):
        host.run("ip", "link", "delete", link)


def bits_per_second(rate: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if not match or float(match[1]) <= 0:
        raise host.LabError(f"'{rate}' is not a rate: say for example 100mbit or 1gbit.")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def shape(node: Node, leader: int) -> None:
    """Limit both directions. The bucket holds about a millisecond, at least one offloaded packet (64 KiB)."""
    burst = max(68_000, int(bits_per_second(node.rate) / 8 / 1000))
    limit = ["tbf", "rate", node.rate, "burst", str(burst), "latency", "25ms"]
    host.run("tc", "qdisc", "replace", "dev", link_name(node.name), "root", *limit)
    host.run("nsenter", "-t", str(leader), "-n", "tc", "qdisc", "replace", "dev", node.nic, "root", *limit)


def set_cable(node: str, connected: bool) -> None:
    host.run("ip", "link", "set", link_name(node), "up" if connected else "down")


def node_addresses(leader: int, nic: str) -> list[str]:
    """The IPv4 addresses that the node has now."""
    text = host.run(
        "nsenter", "-t", str(leader), "-n", "ip", "-j", "-4", "address", "show", "dev", nic, check=False
    )
    links = json.loads(text) if text.strip() else []
    return [entry["local"] for link in links for entry in link.get("addr_info", [])]


def _end_ssh_masters() -> None:
    """End ssh's shared connections to lab nodes: known by their socket, not by their name."""
    text = host.run("ss", "-Htnp", "dst", str(NETWORK), check=False)
    for pid in {int(number) for number in re.findall(r'"ssh",pid=(\d+)', text)}:
        process = host.Process.of(pid)
        try:
            is_master = b"[mux]" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if process and is_master:
            process.kill(signal.SIGTERM)
