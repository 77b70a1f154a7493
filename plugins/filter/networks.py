"""Addresses and networks: who is inside, whom a loaded firewall lets in, and from where this machine would come."""

import ipaddress
import json
import re


def network(text: object) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(str(text), strict=False)
    except ValueError:
        return None


def inside_networks(address: str, networks: list[str]) -> bool:
    """Whether the address (a scope such as %eth0 does not count) lies in one of the networks."""
    where = ipaddress.ip_address(address.split("%")[0])
    return any(where in known for known in map(network, networks) if known)


def not_networks(networks: list[str]) -> list[str]:
    """Those that are neither a network nor an address."""
    return [text for text in networks if not network(text)]


def loaded_admin_networks(table: str) -> list[str]:
    """The networks that may use SSH for good, from our table as nft lists it. Visitors are not among them."""
    chain = re.search(r"^\tchain admin \{\n(.*?)^\t\}", table, re.MULTILINE | re.DOTALL)
    return re.findall(r"\bsaddr (\S+) accept", chain[1]) if chain else []


def route_source(said: str) -> str:
    """The address from which packets would leave, from the JSON of `ip route get`; empty where there is no way."""
    try:
        routes = json.loads(said)
    except ValueError:
        return ""
    return str(routes[0].get("prefsrc", "")) if routes else ""


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "inside_networks": inside_networks,
            "loaded_admin_networks": loaded_admin_networks,
            "not_networks": not_networks,
            "route_source": route_source,
        }
