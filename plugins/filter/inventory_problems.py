"""What is wrong with the names, addresses and settings of an inventory, one sentence each."""

import base64
import binascii
import ipaddress
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# RFC 1123: letters, digits and hyphens, no hyphen at either end, at most 63 characters.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE)

# What Linux takes for the name of a network card, or its hardware address.
CARD = re.compile(r"[^\s/:]{1,15}|([0-9a-f]{2}:){5}[0-9a-f]{2}", re.IGNORECASE)
# Where a machine is reached on the internet: an address, or a name (RFC 1123) with dots.
PUBLIC = re.compile(r"[0-9a-f:]+:[0-9a-f:.]*|[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)
USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
PUBLIC_KEY = re.compile(r"(?:^|\s)((?:sk-)?(?:ssh|ecdsa)-[\w@.-]+)\s+([A-Za-z0-9+/=]+)")

LISTS = ("admin_networks", "lan_nameservers", "lan_services")


def together(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def ipv4(text: object) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(str(text))
    except ipaddress.AddressValueError:
        return None


def unusable(address: ipaddress.IPv4Address) -> bool:
    """Whether no machine of a LAN can have this address."""
    return (
        address.is_loopback or address.is_multicast or address.is_link_local or address.is_unspecified
        or int(address) >> 28 == 15
    )  # fmt: skip


def name_problems(names: list[str]) -> list[str]:
    problems = []
    spelled = defaultdict(list)
    for name in names:
        spelled[name.lower()].append(name)
        if not NAME.fullmatch(name):
            problems.append(
                f"{name} cannot be a hostname: use letters, digits and hyphens, 63 at most, no hyphen at either end."
            )
    for same in spelled.values():
        if len(same) > 1:
            problems.append(
                f"{together(same)} are the same hostname (case does not count): rename one of them."
            )
    return problems


Owners = Mapping[ipaddress.IPv4Address, list[str]]  # the nodes that have an address


def address_problems(
    addresses: Mapping[str, str], first_addresses: Mapping[str, str], prefix: object, gateway: str
) -> list[str]:
    final, problems = final_addresses(addresses)
    problems += first_address_problems(first_addresses, final)
    bits = int(str(prefix)) if str(prefix).isdecimal() else 0
    if not 8 <= bits <= 30:
        problems.append(
            f"lan_prefix is {prefix}: how many bits of an address name the network (24 for 255.255.255.0), 8 to 30."
        )
    elif final:
        problems += lan_problems(final, bits, gateway)
    return problems


def final_addresses(addresses: Mapping[str, str]) -> tuple[Owners, list[str]]:
    """Those that can be used, and what is wrong with the others."""
    final, problems = defaultdict(list), []
    for name, text in addresses.items():
        address = ipv4(text)
        if not text:
            problems.append(f"{name} has no lan_address: give it the address that it shall have in the LAN.")
        elif not address:
            problems.append(
                f"The lan_address of {name} is {text!r}, which is not an IPv4 address: correct it."
            )
        elif unusable(address):
            problems.append(
                f"The lan_address of {name} is {address}, which no machine in a LAN can have: correct it."
            )
        else:
            final[address].append(name)
    problems += [
        f"{together(names)} have the same lan_address {address}: give each node its own."
        for address, names in final.items()
        if len(names) > 1
    ]
    return final, problems


def first_address_problems(addresses: Mapping[str, str], final: Owners) -> list[str]:
    first, problems = defaultdict(list), []
    for name, text in addresses.items():
        address = ipv4(text)
        if address:
            first[address].append(name)
        elif text:
            problems.append(
                f"The first_address of {name} is {text!r}, which is not an IPv4 address: correct it."
            )
        others = together([other for other in final.get(address, []) if other != name])
        if others:
            problems.append(
                f"The first_address of {name} is {address}, which {others} shall have as lan_address: "
                f"give {others} another lan_address, or {name} another address for now."
            )
    return problems + [
        f"{together(names)} have the same first_address {address}: look up which PC has it."
        for address, names in first.items()
        if len(names) > 1
    ]


def lan_problems(final: Owners, prefix: int, gateway: str) -> list[str]:
    networks = defaultdict(list)
    for address, names in final.items():
        networks[ipaddress.ip_interface(f"{address}/{prefix}").network].extend(names)
    if len(networks) > 1:
        where = "; ".join(f"{together(names)} in {network}" for network, names in networks.items())
        return [f"The nodes are not in one network ({where}): correct lan_address or lan_prefix ({prefix})."]
    network = next(iter(networks))
    problems = [
        f"{address} ({together(names)}) means all of {network}: choose an address inside it."
        for address, names in final.items()
        if address in (network.network_address, network.broadcast_address)
    ]
    router = ipv4(gateway)
    if gateway and (not router or router not in network):
        problems.append(
            f"lan_gateway {gateway!r} is not in the nodes' network {network}: correct it in settings.yml."
        )
    if router in final:
        problems.append(
            f"{together(final[router])} and the router (lan_gateway) have the same address {router}."
        )
    return problems


def is_port(value: object) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,5}", str(value))) and 1 <= int(str(value)) <= 65535


def port_problems(ports: Mapping[str, object]) -> list[str]:
    problems = []
    numbers = defaultdict(list)
    for name, value in ports.items():
        if not is_port(value):
            problems.append(f"{name} is {value!r}, which is no port: choose a number from 1 to 65535.")
        elif name != "first_ssh_port":  # it may be that of SSH
            numbers[int(str(value))].append(name)
    for number, names in numbers.items():
        if len(names) > 1:
            problems.append(f"{together(names)} are the same port {number}: give each its own.")
    return problems


def card_problems(cards: Mapping[str, str]) -> list[str]:
    return [
        f"The lan_interface of {name} is {card!r}, which is neither a network card's name (enp3s0, say) nor its "
        "hardware address (00:11:22:33:44:55): correct it."
        for name, card in cards.items()
        if card and not CARD.fullmatch(str(card))
    ]


def list_problems(lists: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """lists: setting -> node name -> its value. A text would be read letter by letter."""
    problems = [
        f"{name} is {'empty' if value is None else repr(value)}, which is no list: write [{value or ''}], in brackets."
        for name, values in lists.items()
        for value in values.values()
        if not isinstance(value, list)
    ]
    return list(dict.fromkeys(problems))


def network_problems(networks: Iterable[str]) -> list[str]:
    problems = []
    for text in networks:
        try:
            ipaddress.ip_network(str(text), strict=False)
        except ValueError:
            problems.append(
                f"admin_networks names {text!r}, which is neither a network (192.168.50.0/24) nor an address: "
                "correct it."
            )
    return problems


def public_problems(addresses: Mapping[str, object], ports: Mapping[str, object]) -> list[str]:
    """addresses, ports: node name -> public_address, public_ssh_port ("" when it has none)."""
    problems = []
    for name, address in addresses.items():
        port = ports.get(name, "")
        if address != "" and not PUBLIC.fullmatch(str(address)):
            problems.append(
                f"The public_address of {name} is {address!r}, which is neither an address nor a machine's name: "
                "correct it (the port of SSH is public_ssh_port, the user first_user)."
            )
        if port != "" and address == "":
            problems.append(f"{name} has a public_ssh_port, but no public_address: name both.")
        elif port != "" and not is_port(port):
            problems.append(f"The public_ssh_port of {name} is {port!r}, which is no port: correct it.")
    return problems


def user_problems(
    users: Mapping[str, str], first: Mapping[str, str], settings: Mapping[str, Any]
) -> list[str]:
    """users, first: node name -> ansible_user, first_user ("" where nobody has said)."""
    admin = settings["admin"]
    problems = [
        f"The ansible_user of {name} is {user!r}, but the controller has an account of its own on every node, {admin}, "
        f"which bootstrap makes. The user that you made when you installed the PC is written as first_user: {user}"
        for name, user in users.items()
        if admin and user != admin
    ]
    problems += [
        f"The first_user of {name} is {user!r}, which is no user's name in Linux: correct it."
        for name, user in first.items()
        if user and not USER.fullmatch(str(user))
    ]
    silent = [name for name, user in first.items() if not user]
    if silent and not settings["bootstrapped"]:
        problems.append(
            f"Nobody has said as whom bootstrap shall log in on {together(silent)}: first_user, the user that you made "
            "when you installed the PCs, in settings.yml or in the node's line of hosts.yml."
        )
    return problems


def wsl_problems(wsl: Iterable[str], nodes: Iterable[str]) -> list[str]:
    return [
        f"{name} is in the group `wsl`, but no node of `cluster`: name it there too, or take it out of `wsl`."
        for name in sorted(set(wsl) - set(nodes))
    ]


def public_key(text: str) -> bytes:
    """The key in the text; nothing when there is none."""
    found = PUBLIC_KEY.search(text)
    try:
        blob = base64.b64decode(found[2], validate=True) if found else b""
    except binascii.Error:
        return b""
    # It begins with its own kind once more, so that half a key is seen.
    return blob if found and blob[4:].startswith(found[1].encode()) and len(blob) > 40 else b""


def second_key_problems(second_key: str, state: str) -> list[str]:
    """second_key: a public key or the path of a file with one; state: the directory with the cluster's own key."""
    if not second_key:
        return []
    file = (
        Path(second_key).expanduser()
        if not PUBLIC_KEY.search(second_key) and "\n" not in second_key
        else None
    )
    text = file.read_text(errors="replace") if file and file.is_file() else second_key
    if "PRIVATE KEY" in text:
        return ["ssh_second_key names a private key, which belongs to its owner only: name its .pub."]
    if not public_key(text):
        return [
            f"ssh_second_key is {second_key[:60]!r}, which is neither a public SSH key (ssh-ed25519 AAAA…) "
            "nor a file with one on this machine: correct it."
        ]
    own = Path(state) / "id_ed25519.pub"
    if own.is_file() and public_key(own.read_text()) == public_key(text):
        return [
            "ssh_second_key is the cluster's own key: if that is lost, so is the way in. Make another one "
            "(ssh-keygen) and keep it elsewhere."
        ]
    return []


def strangers(nodes: Iterable[str], state: str) -> list[str]:
    """Those whose host key is not in known_hosts; all of them without our own key."""
    key, hosts = Path(state) / "id_ed25519", Path(state) / "known_hosts"
    lines = hosts.read_text().splitlines() if key.is_file() and hosts.is_file() else []
    known = {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
    return [name for name in nodes if name not in known]


def bootstrap_problems(nodes: Iterable[str], settings: Mapping[str, Any], inventory: str) -> list[str]:
    new = strangers(nodes, settings["state"]) if settings["bootstrapped"] else []
    if not new:
        return []
    where = os.path.relpath(inventory, os.environ.get("PWD") or ".")
    return [
        f"{', '.join(new)} {'have' if len(new) > 1 else 'has'} not been through bootstrap: ansible-playbook -i {where} "
        f"playbooks/bootstrap.yml {settings['bootstrap_options']}"
    ]


def inventory_problems(
    settings: Mapping[str, Any],
    groups: Mapping[str, list[str]],
    hostvars: Mapping[str, Mapping[str, Any]],
    nodes: Iterable[str],
    inventory: str,
    shared: list[str],
) -> list[str]:
    """Sentences about what cannot be right; none when all is well.

    settings: see playbooks/inventory_check.yml. groups, hostvars: what hosts.yml says, in its own
    words. nodes: those that take part (--limit leaves out the others). inventory: its directory. shared: what is wrong
    with the shared directory.
    """
    interface, cluster = settings["interface"], groups.get("cluster", [])

    def said(name: str, otherwise: object = "") -> dict[str, Any]:
        return {node: hostvars[node].get(name, otherwise) for node in cluster}

    if interface and not Path("/sys/class/net", interface).exists():
        return [f"The lab is not up (this machine has no interface {interface}): tests/lab/lab up"]
    if not cluster:
        return [
            "The group `cluster` of this inventory has no nodes: add them to its hosts.yml, one line each."
        ]
    no_lists = list_problems({name: said(name, []) for name in LISTS})
    return (
        name_problems(cluster)
        + address_problems(
            said("lan_address"), said("first_address"), settings["prefix"], settings["gateway"]
        )
        + card_problems(said("lan_interface"))
        + (no_lists or network_problems(settings["admin_networks"]))
        + port_problems(settings["ports"])
        + user_problems(said("ansible_user"), said("first_user"), settings)
        + second_key_problems(settings["second_key"], settings["state"])
        + wsl_problems(groups.get("wsl", []), cluster)
        + public_problems(said("public_address"), said("public_ssh_port"))
        + shared
        + bootstrap_problems(nodes, settings, inventory)
    )


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"inventory_problems": inventory_problems}
