"""Is an address inside one of some networks? Which card has it?"""

import ipaddress
from typing import Any


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


def card_with(cards: list[dict[str, Any]], address: str) -> str:
    """The name of the card (of those that node_state has seen) that has the address; empty when none has."""
    return next(
        (card["name"] for card in cards for own in card["addresses"] if own.split("/")[0] == address), ""
    )


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"inside_networks": inside_networks, "not_networks": not_networks, "card_with": card_with}
