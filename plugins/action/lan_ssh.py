"""What answers on SSH in the network that this machine is in."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader

UNASKED = 1024  # addresses: a /22. Larger networks are asked only where somebody says so,
MOST = 65536  # and no larger ones than a /16: that takes a quarter of an hour.
AT_ONCE = 64  # connections
PATIENCE, MORE_PATIENCE = 1.0, 5.0  # seconds for a connection, which a kernel makes
GREETING = 4.0  # seconds for what sshd says, at most
RESOLVER_FILES = ("/run/systemd/resolve/resolv.conf", "/etc/resolv.conf")

# Here, and not in the threads that use them.
ssh_fingerprint, ssh_greeting, ssh_host_key = (
    filter_loader.get(name).j2_function for name in ("ssh_fingerprint", "ssh_greeting", "ssh_host_key")
)

Machine = dict[str, Any]


# ── where this machine is ────────────────────────────────────────────────────────────────────────


def places(cards: list[dict[str, Any]]) -> list[tuple[str, ipaddress.IPv4Interface]]:
    """cards: what `ip -json -4 address` says. Those networks that have neighbours."""
    found = [
        (card["ifname"], ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}"))
        for card in cards
        for address in card.get("addr_info", [])
        if address.get("scope") == "global" and card.get("operstate") != "DOWN"
    ]
    return [(card, own) for card, own in found if own.network.prefixlen <= 30]


def ipv4(text: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        raise AnsibleActionFail(f"{text!r} is no IPv4 address (192.168.50.21, say).") from None


def wanted_network(text: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        raise AnsibleActionFail(f"network={text} is no IPv4 network (192.168.50.0/24, say).") from None
    if network.num_addresses > MOST:
        raise AnsibleActionFail(
            f"{network} has {network.num_addresses:,} addresses, too many to ask: name a part of it."
        )
    return network


def place(
    cards: list[dict[str, Any]], routes: list[dict[str, Any]], network: str, addresses: list[str]
) -> tuple[str, ipaddress.IPv4Interface]:
    """The card and address by which this machine is in the nodes' network. routes: `ip -json -4 route`."""
    here = places(cards)
    if not here:
        raise AnsibleActionFail(
            "This machine is in no network: plug in its cable, or join its Wi-Fi, and try again."
        )
    names = ", ".join(f"{own.network} ({card})" for card, own in here)
    if addresses or network:
        asked = {ipaddress.IPv4Network(ipv4(address)) for address in addresses} or {wanted_network(network)}
        for card, own in here:
            if all(part.subnet_of(own.network) for part in asked):
                return card, own
        said = ", ".join(addresses) or network
        raise AnsibleActionFail(
            f"{said} is in no network of this machine, which is in {names}. The nodes have to be in one with it."
        )
    ways = sorted((way for way in routes if way["dst"] == "default"), key=lambda way: way.get("metric", 0))
    for way in ways[:1]:
        out = [(card, own) for card, own in here if card == way["dev"]]
        out.sort(key=lambda found: not gateway([way], *found))
        if out:
            return out[0]
    if not ways and len(here) == 1:
        return here[0]
    raise AnsibleActionFail(
        "This machine has no way to the internet that says which network is meant. It is in "
        f"{names}: -e network={here[0][1].network}, say"
    )


def is_lent(cards: list[dict[str, Any]], own: ipaddress.IPv4Interface) -> bool:
    """Whether the address is the router's (DHCP), which may give another one tomorrow."""
    addresses = [address for card in cards for address in card.get("addr_info", [])]
    return any(one["local"] == str(own.ip) and one.get("dynamic", False) for one in addresses)


def gateway(routes: list[dict[str, Any]], card: str, own: ipaddress.IPv4Interface) -> str:
    """The router, where there is one in this network."""
    ways = [way.get("gateway", "") for way in routes if way["dst"] == "default" and way["dev"] == card]
    return next((way for way in ways if way and ipaddress.IPv4Address(way) in own.network), "")


def nameservers(texts: Iterable[str], router: str) -> list[str]:
    """Those that another machine can ask too; the router where this machine asks only itself."""
    for text in texts:
        named = re.findall(r"^nameserver\s+(\d+\.\d+\.\d+\.\d+)\s*$", text, re.MULTILINE)
        usable = [address for address in named if not ipaddress.IPv4Address(address).is_loopback]
        if usable:
            return list(dict.fromkeys(usable))
    return [router] if router else []


def to_ask(own: ipaddress.IPv4Interface, network: str) -> list[str]:
    asked = wanted_network(network) if network else own.network
    if not network and asked.num_addresses > UNASKED:
        part = ipaddress.IPv4Network(f"{own.ip}/24", strict=False)
        raise AnsibleActionFail(
            f"This machine's network is {asked}: {asked.num_addresses:,} addresses, too many to ask unasked. Which "
            f"part of it are the PCs in? -e network={part} (this machine's own), or name them: -e nodes=ADDRESS,ADDRESS"
        )
    return [str(address) for address in asked.hosts()]


# ── who answers there ────────────────────────────────────────────────────────────────────────────


def shown(text: str) -> str:
    """What a stranger says goes to a terminal."""
    return re.sub(r"[^ -~]", "?", text.strip())[:60]


def greeting(address: str, port: int, patience: float) -> tuple[str, str]:
    """What answers there, and the name that an SSH server gives itself."""
    try:
        answer, said = ssh_greeting(address, port, patience, GREETING)
    except OSError:
        return "silence", ""
    line = said.splitlines()[0].decode(errors="replace") if answer == "ssh" else ""
    return answer, shown(line.partition("-")[2].partition("-")[2])


def host_key(address: str, port: int) -> tuple[str, str]:
    """Kind and fingerprint of the server's best key."""
    try:
        kind, public = ssh_host_key(address, port, patience=5)
    except FileNotFoundError:
        raise AnsibleActionFail("This machine has no ssh-keyscan: sudo apt install openssh-client") from None
    return kind.removeprefix("ssh-"), ssh_fingerprint(public) if public else ""


def name(address: str) -> str:
    """By this machine's resolver, or by mDNS where avahi-utils is there."""
    for command in (["getent", "hosts", address], ["avahi-resolve-address", address]):
        try:
            said = subprocess.run(
                command, capture_output=True, text=True, timeout=2, check=False
            ).stdout.split()
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue
        if len(said) > 1:
            return shown(said[1].rstrip("."))
    return ""


def mark_twins(machines: list[Machine]) -> None:
    """The same host key at two addresses: this machine's own address, or else the first one, stands for it."""
    first: dict[str, str] = {}
    for machine in sorted(machines, key=lambda machine: not machine["own"]):
        if machine["key"]:
            twin = first.setdefault(machine["key"], machine["address"])
            machine["twin"] = twin if twin != machine["address"] else ""


def scan(
    addresses: list[str], port: int, own: str, router: str, named: bool
) -> tuple[list[Machine], list[str]]:
    """The SSH servers, this machine, and where the addresses were named all of them; then who is there without one."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        patience = MORE_PATIENCE if named else PATIENCE
        said = pool.map(lambda one: greeting(one, port, patience), addresses)
        answers = dict(zip(addresses, said, strict=True))
        chosen = [one for one, (answer, _) in answers.items() if answer == "ssh" or named or one == own]
        names = dict(zip(chosen, pool.map(name, chosen), strict=True))
        servers = [one for one in chosen if answers[one][0] == "ssh"]
        keys = dict(zip(servers, pool.map(lambda one: host_key(one, port), servers), strict=True))
    machines = []
    for one in chosen:
        kind, key = keys.get(one, ("", ""))
        answer, server = answers[one]
        machines.append({
            "address": one, "answer": answer, "server": server, "kind": kind, "key": key, "twin": "",
            "name": names[one], "own": one == own, "router": one == router,
        })  # fmt: skip
    mark_twins(machines)
    return machines, [
        one for one, (answer, _) in answers.items() if answer == "refused" and one not in chosen
    ]


def addresses_and_routes() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    def said(what: str) -> list[dict[str, Any]]:
        ip = subprocess.run(["ip", "-json", "-4", what], capture_output=True, text=True, check=True)
        found: list[dict[str, Any]] = json.loads(ip.stdout or "[]")
        return found

    return said("address"), said("route")


def look(network: str, addresses: list[str], port: int) -> dict[str, Any]:
    cards, routes = addresses_and_routes()
    card, own = place(cards, routes, network, addresses)
    router = gateway(routes, card, own)
    asked = addresses or to_ask(own, network)
    machines, without = scan(asked, port, str(own.ip), router, bool(addresses))
    resolvers = []
    for path in map(Path, RESOLVER_FILES):
        with contextlib.suppress(OSError):
            resolvers.append(path.read_text())
    here = {
        "card": card, "address": str(own.ip), "prefix": own.network.prefixlen, "network": str(own.network),
        "gateway": router, "nameservers": nameservers(resolvers, router) if router else [], "asked": len(asked),
        "lent": is_lent(cards, own),
    }  # fmt: skip
    return {"here": here, "machines": machines, "without": without}


class ActionModule(ActionBase):
    """Finds the SSH servers of the LAN that this machine is in: connects to one `port` of every address, some dozens at
    a time, reads the server's greeting and its host key. Nobody logs in, nothing is changed.

    The network is that of the route to the internet, unless `network` (192.168.50.0/24, say) or `addresses` say it;
    what is named so is asked with more patience, and stands in the result whatever it answers.

    The answer: `here` (of this machine: card, address, prefix, network, gateway, nameservers; how many were `asked`;
    whether the address is `lent` by the router), `machines` (address, answer, server, key: a fingerprint, kind of key,
    name, own: this machine, router, twin: another address with the same key), and `without`, the addresses of machines
    without an SSH server.
    """

    _VALID_ARGS = frozenset(("network", "addresses", "port"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        asked = self._task.args
        found = look(asked.get("network", ""), asked.get("addresses", []), int(asked.get("port", 22)))
        return {"changed": False, **found}
