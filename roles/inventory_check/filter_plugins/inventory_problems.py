"""What is wrong with the names and addresses of an inventory, one sentence each."""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Mapping

# RFC 1123: letters, digits and hyphens, no hyphen at either end, at most 63 characters.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE)


def together(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def ipv4(text: object) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(str(text))
    except ipaddress.AddressValueError:
        return None


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


def address_problems(
    addresses: Mapping[str, str], first_addresses: Mapping[str, str], prefix: int, gateway: str
) -> list[str]:
    problems = []
    final = defaultdict(list)
    for name, text in addresses.items():
        address = ipv4(text)
        if not text:
            problems.append(f"{name} has no lan_address: give it the address that it shall have in the LAN.")
        elif not address:
            problems.append(
                f"The lan_address of {name} is {text!r}, which is not an IPv4 address: correct it."
            )
        else:
            final[address].append(name)
    for address, names in final.items():
        if len(names) > 1:
            problems.append(f"{together(names)} have the same lan_address {address}: give each node its own.")

    first = defaultdict(list)
    for name, text in first_addresses.items():
        address = ipv4(text)
        if not text:
            continue
        if not address:
            problems.append(
                f"The first_address of {name} is {text!r}, which is not an IPv4 address: correct it."
            )
            continue
        first[address].append(name)
        others = [other for other in final.get(address, []) if other != name]
        if others:
            problems.append(
                f"The first_address of {name} is {address}, which {together(others)} shall have as lan_address: "
                f"give {together(others)} another lan_address, or {name} another address for now."
            )
    for address, names in first.items():
        if len(names) > 1:
            problems.append(
                f"{together(names)} have the same first_address {address}: look up which PC has it."
            )

    if not final:
        return problems
    networks = defaultdict(list)
    for address, names in final.items():
        networks[ipaddress.ip_interface(f"{address}/{prefix}").network].extend(names)
    if len(networks) > 1:
        where = "; ".join(f"{together(names)} in {network}" for network, names in networks.items())
        problems.append(
            f"The nodes are not in one network ({where}): correct lan_address or lan_prefix ({prefix})."
        )
        return problems
    network = next(iter(networks))
    for address, names in final.items():
        if prefix < 31 and address in (network.network_address, network.broadcast_address):
            problems.append(
                f"{address} ({together(names)}) means all of {network}: choose an address inside it."
            )
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


def inventory_problems(
    addresses: Mapping[str, str], first_addresses: Mapping[str, str], prefix: int, gateway: str
) -> list[str]:
    """Sentences about names and addresses; none when all is well.

    addresses, first_addresses: node name -> lan_address, first_address ("" when it has none).
    """
    if not addresses:
        return [
            "The group `cluster` of this inventory has no nodes: add them to its hosts.yml, one line each."
        ]
    return name_problems(list(addresses)) + address_problems(addresses, first_addresses, int(prefix), gateway)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"inventory_problems": inventory_problems}
