"""The lab's switches: bridges, shaped links, DHCP as a router gives it, and NAT to the outside.

auralab0 is the home network with its router: 198.18.50.0/24, and 198.18.60.0/24 without DHCP on the same wire, for
nodes that move. auralab1 is a switch without a router, for second cards: 198.18.70.0/24, no DHCP, no way out.
Everything has the lab's own name (auralab*, al-*, table ip auralab), so that it can be removed by name.
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
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_lab import host

if TYPE_CHECKING:
    from aura_lab.node import Node

BRIDGE = "auralab0"
NETWORK = ipaddress.IPv4Network("198.18.50.0/24")
HOST_ADDRESS = "198.18.50.1"
OTHER_NETWORK = ipaddress.IPv4Network("198.18.60.0/24")
SWITCH = "auralab1"
SWITCH_NETWORK = ipaddress.IPv4Network("198.18.70.0/24")
# bridge -> what is on its wire; this machine is .1 everywhere
_WIRES = {BRIDGE: [NETWORK, OTHER_NETWORK], SWITCH: [SWITCH_NETWORK]}
TABLE = ("ip", "auralab")
# The guide's LS1005G: gigabit ports.
FULL_RATE = "1gbit"
# Nothing for a lab address ever leaves this machine: it belongs on the lab's wires or nowhere. A switch does not route.
# One wire with two networks would make this machine tell the nodes of a shorter way; a router at home does not.
_RULES = """
table ip auralab {{
    counter downloaded {{}}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {{ {home}, {other} }} oifname != {{ "{bridge}", "{switch}" }} masquerade
    }}
    chain forward {{
        type filter hook forward priority filter; policy accept;
        ip daddr {first}-{last} oifname != {{ "{bridge}", "{switch}" }} drop
        iifname "{switch}" oifname != "{switch}" drop
        iifname != "{switch}" oifname "{switch}" drop
        {no_internet}
        iifname != "{bridge}" oifname "{bridge}" counter name downloaded
        oifname != "{bridge}" iifname "{bridge}" tcp flags syn tcp option maxseg size set rt mtu
        iifname != "{bridge}" oifname "{bridge}" tcp flags syn tcp option maxseg size set rt mtu
    }}
    chain output {{
        type filter hook output priority filter; policy accept;
        ip daddr {first}-{last} oifname != {{ "{bridge}", "{switch}", "lo" }} drop
        oifname "{bridge}" icmp type redirect drop
    }}
}}
"""
# What this machine's kernel has to allow at least, while the lab is there.
_KERNEL = {
    "ip_forward": (Path("/proc/sys/net/ipv4/ip_forward"), 1),
    # A node's systemd takes seven or so, and many a kernel allows 128 to all of them together.
    "inotify_instances": (Path("/proc/sys/fs/inotify/max_user_instances"), 1024),
}
_HOSTS = host.OWN / "dhcp-hosts"


def link_name(node: str, card: int = 0) -> str:
    """The host's end of the cable to a node's first or second card (at most 15 characters)."""
    short = node if len(node) <= 12 else hashlib.sha256(node.encode()).hexdigest()[:12]
    return f"{('al', 'am')[card]}-{short}"


def mac(address: str, card: int = 0) -> str:
    """A card's hardware address: always the same for the same first address of the node."""
    return f"02:a{card + 1}:" + ":".join(f"{int(part):02x}" for part in address.split("."))


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


def up(internet: bool = True) -> None:
    """Bring up the bridges, NAT and DHCP."""
    for bridge, wire in _WIRES.items():
        if not exists(bridge):
            for subnet in wire:
                routes = json.loads(host.run("ip", "-j", "route", "show", "root", str(subnet)))
                if routes:
                    raise host.LabError(
                        f"This machine already has a route to {routes[0]['dst']}, which the lab needs for itself."
                    )
            # An address of its own, as a router has: a bridge's changes with its ports, and nodes remember it.
            own = mac(str(wire[0][1]))
            host.run("ip", "link", "add", bridge, "address", own, "type", "bridge", "forward_delay", "0")
        for subnet in wire:
            host.run("ip", "address", "replace", f"{subnet[1]}/{subnet.prefixlen}", "dev", bridge)
        host.run("ip", "link", "set", bridge, "up")
    set_internet(internet)
    for path, least in _KERNEL.values():
        if int(path.read_text()) < least:
            path.write_text(str(least))
    for rule in _iptables_rules():
        if not host.succeeds("iptables", "-w", "-C", *rule):
            host.run("iptables", "-w", "-I", *rule)
    _start_dhcp()


def set_internet(reachable: bool) -> None:
    """Load the lab's rules: with a way out for the nodes, or without one. Counts what comes in from outside anew."""
    rules = _RULES.format(
        bridge=BRIDGE, switch=SWITCH, home=NETWORK, other=OTHER_NETWORK, first=NETWORK[0], last=SWITCH_NETWORK[-1],
        no_internet="" if reachable else f'iifname "{BRIDGE}" oifname != "{BRIDGE}" drop',
    )  # fmt: skip
    host.run("nft", "-f", "-", stdin=f"table ip auralab\ndelete table ip auralab\n{rules}")


def downloaded() -> int:
    """Bytes that the nodes have got from outside the lab since its rules were loaded."""
    listed = json.loads(host.run("nft", "--json", "list", "counter", *TABLE, "downloaded"))
    return next(int(entry["counter"]["bytes"]) for entry in listed["nftables"] if "counter" in entry)


def remember(memory: dict[str, Any]) -> None:
    """Note what this machine was like before the lab; to be saved before `up` changes it."""
    for name, (path, _) in _KERNEL.items():
        memory.setdefault(name, path.read_text().strip())


def down(memory: dict[str, Any]) -> None:
    _end_ssh_masters()
    for dhcp in host.processes_with(f"--dhcp-hostsfile={_HOSTS}"):
        dhcp.kill(signal.SIGTERM)
    for bridge in filter(exists, _WIRES):
        host.run("ip", "link", "delete", bridge)
    if shutil.which("nft") and host.succeeds("nft", "list", "table", *TABLE):
        host.run("nft", "delete", "table", *TABLE)
    for rule in _lab_rules():
        while shutil.which("iptables") and host.succeeds("iptables", "-w", "-D", *rule):
            pass
    for name, (path, _) in _KERNEL.items():
        if name in memory:
            path.write_text(memory[name])


def _lab_rules() -> list[list[str]]:
    comment = ["-m", "comment", "--comment", "aura-lab", "-j", "ACCEPT"]
    return [
        ["FORWARD", "-i", BRIDGE, *comment],
        ["FORWARD", "-o", BRIDGE, *comment],
        ["INPUT", "-i", BRIDGE, *comment],
        ["INPUT", "-i", SWITCH, *comment],
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


def plug_tap(node: str, card: int) -> str:
    """A cable to a virtual machine's card, still unplugged; its name."""
    link = link_name(node, card)
    unplug(node, card)
    host.run("ip", "tuntap", "add", link, "mode", "tap")
    host.run("ip", "link", "set", link, "master", (BRIDGE, SWITCH)[card])
    return link


def unplug(node: str, card: int = 0) -> None:
    link = link_name(node, card)
    # When a node has just ended, its namespace may take the cable along while we do.
    deadline = time.monotonic() + 10
    while exists(link) and not host.succeeds("ip", "link", "delete", link):
        if time.monotonic() > deadline:
            host.run("ip", "link", "delete", link)  # says why
        time.sleep(0.1)
    if exists(_inward(link)):
        host.run("ip", "link", "delete", _inward(link))


def _inward(link: str) -> str:
    """The device that shapes what comes in over a tap: the kernel shapes only what it sends."""
    return f"ai-{link.partition('-')[2]}"


def bits_per_second(rate: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if not match or float(match[1]) <= 0:
        raise host.LabError(f"'{rate}' is not a rate: say for example 100mbit or 1gbit.")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _limit(rate: str) -> list[str]:
    """The bucket holds about a millisecond, at least one offloaded packet (64 KiB). The queue holds 25 ms, at least the
    1,000 packets of Linux's own: shorter ones drop what a card with flow control would only hold up."""
    per_second = bits_per_second(rate) / 8
    burst, queue = max(68_000, int(per_second / 1000)), max(1_500_000, int(per_second / 40))
    return ["tbf", "rate", rate, "burst", str(burst), "limit", str(burst + queue)]


def shape(node: Node, leader: int) -> None:
    """Limit both directions."""
    limit = _limit(node.rate)
    host.run("tc", "qdisc", "replace", "dev", link_name(node.name), "root", *limit)
    host.run("nsenter", "-t", str(leader), "-n", "tc", "qdisc", "replace", "dev", node.nic, "root", *limit)


def shape_tap(node: Node) -> None:
    """Limit both directions of a virtual machine's home card, as far as a whole gigabit has to be limited at all."""
    link = link_name(node.name)
    inward = _inward(link)
    host.run("tc", "qdisc", "replace", "dev", link, "root", *_limit(node.rate))
    if node.rate == FULL_RATE and not exists(inward):
        return
    if not exists(inward):
        host.run("ip", "link", "add", inward, "type", "ifb")
        host.run("ip", "link", "set", inward, "up")
        host.run("tc", "qdisc", "add", "dev", link, "handle", "ffff:", "ingress")
        everything = ["parent", "ffff:", "protocol", "all", "u32", "match", "u32", "0", "0"]
        redirect = ["action", "mirred", "egress", "redirect", "dev", inward]
        host.run("tc", "filter", "add", "dev", link, *everything, *redirect)
    host.run("tc", "qdisc", "replace", "dev", inward, "root", *_limit(node.rate))


def set_cable(node: str, connected: bool, card: int = 0) -> None:
    host.run("ip", "link", "set", link_name(node, card), "up" if connected else "down")


def node_addresses(leader: int, nic: str) -> list[str]:
    """The IPv4 addresses that the node has now."""
    text = host.run(
        "nsenter", "-t", str(leader), "-n", "ip", "-j", "-4", "address", "show", "dev", nic, check=False
    )
    links = json.loads(text) if text.strip() else []
    return [entry["local"] for link in links for entry in link.get("addr_info", [])]


def _end_ssh_masters() -> None:
    """End ssh's shared connections to lab nodes: known by their socket, not by their name."""
    wires = [f"dst {subnet}" for subnets in _WIRES.values() for subnet in subnets]
    text = host.run("ss", "-Htnp", " or ".join(wires), check=False)
    for pid in {int(number) for number in re.findall(r'"ssh",pid=(\d+)', text)}:
        process = host.Process.of(pid)
        try:
            is_master = b"[mux]" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if process and is_master:
            process.kill(signal.SIGTERM)
