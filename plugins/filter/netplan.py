"""What netplan is told about one network card: by others until now, and by us from now on."""

from __future__ import annotations

import fnmatch
import ipaddress
from typing import Any

import yaml

Card = dict[str, Any]
Definition = dict[str, Any]

OURS = "/etc/netplan/90-aura.yaml"
# Of several definitions that fit a card, systemd-networkd takes the first by name.
NAME = "0-aura"
# What else was said about the card stays: none of it is an address, a route or a name server for IPv4.
SWITCHES = (
    "wakeonlan", "optional", "emit-lldp", "accept-ra", "ipv6-privacy", "dhcp6", "ignore-carrier",
    "receive-checksum-offload", "transmit-checksum-offload", "tcp-segmentation-offload", "tcp6-segmentation-offload",
    "generic-segmentation-offload", "generic-receive-offload", "large-receive-offload",
)  # fmt: skip
NUMBERS = ("mtu", "ipv6-mtu", "infiniband-mode", "delay-virtual-functions-rebind")
OTHERS = (
    "set-name", "macaddress", "auth", "link-local", "gateway6", "ipv6-address-generation", "ipv6-address-token",
    "routing-policy",
)  # fmt: skip
MAIN_TABLE = (None, "main", "254")
YES, NO = ("true", "yes", "on", "y"), ("false", "no", "off", "n")


class Unusable(Exception):
    """A sentence for the person who asked."""


def tree(path: str, text: str) -> Definition:
    """What the file says below `network`, all scalars as they are written (to YAML, 52:54:00:12:34:56 is a number)."""
    try:
        top = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 (makes strings only)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise Unusable(f"netplan's file {path} is no YAML ({said}). Mend it or take it away.") from error
    return mapping(mapping(top).get("network"))


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def section(network: Definition, kind: str) -> dict[str, Definition]:
    return {name: mapping(entry) for name, entry in mapping(network.get(kind)).items()}


def merged(trees: dict[str, Definition], kind: str) -> dict[str, Definition]:
    """One definition may be spread over several files; a later file has the last word."""
    together: dict[str, Definition] = {}
    for path in in_order(trees):
        for name, entry in section(trees[path], kind).items():
            together[name] = {**together.get(name, {}), **entry}
    return together


def in_order(paths: Any) -> list[str]:
    """As netplan reads them: by name, wherever they lie."""
    return sorted(paths, key=lambda path: path.rpartition("/")[2])


def is_about(name: str, definition: Definition, card: Card) -> bool:
    """Whether a definition fits this card and could fit no other one."""
    match = definition.get("match")
    if not isinstance(match, dict) or not match:
        return "match" not in definition and name == card["name"]
    macs = {card["mac"].lower(), card["permanent_mac"].lower()} - {""}
    by_mac = str(match.get("macaddress", "")).lower() in macs
    wanted = str(match.get("name", ""))
    if "macaddress" in match:
        return by_mac and (
            not wanted or fnmatch.fnmatchcase(card["name"], wanted) or "set-name" in definition
        )
    return bool(wanted == card["name"])


def built_on(trees: dict[str, Definition], name: str) -> str:
    """The bridge, bond or VLAN that uses this definition, with the file that says so."""
    for path, network in trees.items():
        for kind in network:
            for other, entry in section(network, kind).items():
                if name == entry.get("link") or name in sequence(entry.get("interfaces")):
                    return f"{path} builds {other} ({kind}) on {name}"
    return ""


def without(text: str, names: list[str]) -> str:
    """The file without these definitions, the rest as it was written but for comments; '' if nothing is left."""
    document: Any = yaml.compose(text, Loader=yaml.BaseLoader)
    network = child(document, "network")
    cards = child(network, "ethernets")
    cards.value = [(key, value) for key, value in cards.value if key.value not in names]
    if not cards.value:
        network.value = [(key, value) for key, value in network.value if key.value != "ethernets"]
    # networkd is what netplan takes anyway.
    if all(
        key.value == "version" or (key.value, value.value) == ("renderer", "networkd")
        for key, value in network.value
    ):
        return ""
    for node in (document, network, cards):
        node.flow_style = False
    return yaml.serialize(document, Dumper=yaml.BaseDumper)


def child(node: Any, name: str) -> Any:
    return next(value for key, value in node.value if key.value == name)


def is_ipv6(text: Any) -> bool:
    return ":" in str(text)


def plain(key: str, value: Any) -> Any:
    """A switch or a number as YAML would have it; everything else stays a string."""
    word = str(value).lower()
    if key in SWITCHES and word in (*YES, *NO):
        return word in YES
    return int(value) if key in NUMBERS and word.isdigit() else value


def kept(definitions: list[Definition]) -> Definition:
    """What stays of the old definitions; of two that say the same, the last one counts."""
    result: Definition = {}
    for old in definitions:
        result |= {key: plain(key, old[key]) for key in (*SWITCHES, *NUMBERS, *OTHERS) if key in old}
        # An address may have options: it is the only key of a mapping then.
        addresses = [
            entry for entry in sequence(old.get("addresses")) if is_ipv6(next(iter(mapping(entry)), entry))
        ]
        # The default route is ours to say; somebody may come over any other one.
        routes = [
            route
            for route in map(mapping, sequence(old.get("routes")))
            if is_ipv6(route.get("via", route.get("to"))) or not is_default(route)
        ]
        search = mapping(old.get("nameservers")).get("search")
        result |= {
            key: value
            for key, value in (("addresses", addresses), ("routes", routes), ("search", search))
            if value
        }
    return result


def is_default(route: Definition) -> bool:
    return route.get("to") in ("default", "0.0.0.0/0", "0/0") and route.get("table") in MAIN_TABLE


def unreachable(routes: list[Definition], network: ipaddress.IPv4Network) -> list[str]:
    """IPv4 routes whose router would be in no network of the card any more."""
    return [
        f"{route.get('to')} by {route['via']}"
        for route in routes
        if "via" in route and not is_ipv6(route["via"]) and not is_in(route["via"], network)
    ]


def is_in(address: Any, network: ipaddress.IPv4Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False


def renderer(trees: dict[str, Definition], card: Card) -> str:
    """Who has the card in his hands keeps it; nobody has it (no cable): whom our file or netplan as a whole names."""
    if card["manager"] in ("networkd", "NetworkManager"):
        return str(card["manager"])
    own = section(trees.get(OURS, {}), "ethernets").get(NAME, {}).get("renderer")
    everywhere = [trees[path]["renderer"] for path in in_order(trees) if trees[path].get("renderer")]
    return str(own or (everywhere or ["networkd"])[-1])


def definition(
    trees: dict[str, Definition], old: list[Definition], card: Card, wanted: dict[str, Any]
) -> Definition:
    """Our definition of the card. wanted: address, prefix, gateway, nameservers."""
    stays = kept(old)
    addresses = [f"{wanted['address']}/{wanted['prefix']}", *stays.pop("addresses", [])]
    routes = [{"to": "default", "via": wanted["gateway"]}] if wanted["gateway"] else []
    others = stays.pop("routes", [])
    if lost := unreachable(others, ipaddress.ip_interface(addresses[0]).network):
        raise Unusable(
            f"netplan has routes of {card['name']} that would lead nowhere from {addresses[0]}: {', '.join(lost)}. "
            "Somebody may come over them. Take them out of netplan's files, or choose a lan_address in "
            "their router's network."
        )
    routes += others
    servers = {"addresses": list(wanted["nameservers"])} if wanted["nameservers"] else {}
    if "search" in stays:
        servers["search"] = stays.pop("search")
    if not card["permanent_mac"]:
        stays.pop("set-name", None)
    by = {"macaddress": card["permanent_mac"]} if card["permanent_mac"] else {"name": card["name"]}
    who = renderer(trees, card)
    result = {
        "renderer": who,
        "match": by,
        "dhcp4": False,
        # NetworkManager asks for it where nobody has said anything, and somebody may come by that address.
        "dhcp6": stays.pop("dhcp6", who == "NetworkManager" and not any(old)),
        "addresses": addresses,
    }
    if routes:
        result["routes"] = routes
    if servers:
        result["nameservers"] = servers
    if who == "NetworkManager":
        # Profiles that somebody made for the card by hand are still there; this one comes first.
        result["networkmanager"] = {"passthrough": {"connection.autoconnect-priority": "100"}}
    return {**result, **stays}


def netplan_takeover(texts: dict[str, str], card: Card, wanted: dict[str, Any]) -> dict[str, Any]:
    """What netplan's files shall be for the card to have its address from us.

    texts: netplan's files by path. The answer: problem ('' or a sentence), definition (ours), and others: the files in
    /etc/netplan that say something about this card alone, as {path, original, content}; content is '' when nothing is
    left of the file.
    """
    if not card["name"]:
        return {"problem": "", "definition": {}, "others": []}
    try:
        trees = {path: tree(path, text) for path, text in texts.items()}
        return {"problem": "", **takeover(texts, trees, card, wanted)}
    except Unusable as problem:
        return {"problem": str(problem), "definition": {}, "others": []}


def takeover(
    texts: dict[str, str], trees: dict[str, Definition], card: Card, wanted: dict[str, Any]
) -> dict[str, Any]:
    foreign = {path: trees[path] for path in in_order(trees) if path != OURS}
    about = [name for name, entry in merged(foreign, "ethernets").items() if is_about(name, entry, card)]
    for built in filter(None, (built_on(foreign, name) for name in about)):
        raise Unusable(
            f"{built}, so {card['name']} is no ordinary wired card, and only such a one can have the address."
        )
    named = {
        path: [name for name in about if name in section(network, "ethernets")]
        for path, network in foreign.items()
    }
    old = [section(trees.get(OURS, {}), "ethernets").get(NAME, {})]
    old += [section(foreign[path], "ethernets")[name] for path, names in named.items() for name in names]
    others = [
        {"path": path, "original": texts[path], "content": without(texts[path], names)}
        for path, names in named.items()
        if names and path.startswith("/etc/netplan/")
    ]
    return {"definition": definition(trees, old, card, wanted), "others": others}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"netplan_takeover": netplan_takeover}
