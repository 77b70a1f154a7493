"""Which network card of a node is the LAN's, and whether it may have the way out."""

from __future__ import annotations

import ipaddress
from typing import Any

Card = dict[str, Any]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

KINDS = {"ethernet": "wired", "wifi": "Wi-Fi", "virtual": "virtual"}
TELL = "Say which one it is: lan_interface (its name or MAC address) for this node in hosts.yml."
STAY = "Where it has Wi-Fi only, and the address that it shall have: static_network_enabled: false there."


def described(card: Card) -> str:
    """enp3s0 (aa:bb:cc:dd:ee:ff, 192.168.1.50/24, link, default route)"""
    kind = [] if card["kind"] == "ethernet" else [str(KINDS.get(card["kind"], card["kind"]))]
    addresses = [text for text in card["addresses"] if not text.lower().startswith("fe80:")]
    link = "link" if card["carrier"] else "no link" if card["up"] else "switched off"
    way_out = ["default route"] if card["gateway"] else []
    return (
        f"{card['name']} ({', '.join([*kind, card['mac'], *(addresses or ['no address']), link, *way_out])})"
    )


def listed(cards: list[Card]) -> str:
    """All cards that somebody might mean; virtual ones (Docker's) only if there is nothing else."""
    real = [card for card in cards if card["kind"] != "virtual"] or cards
    return "Its cards: " + "; ".join(map(described, real)) + "." if real else "It has no network card."


def addresses_of(card: Card) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    return [ipaddress.ip_interface(text.split("%")[0]) for text in card["addresses"]]


def one_of(found: list[Card]) -> Card | None:
    """The only card; of several, the only one at a cable that leads somewhere."""
    if len(found) == 1:
        return found[0]
    linked = [card for card in found if card["kind"] == "ethernet" and card["carrier"]]
    return linked[0] if len(linked) == 1 else None


def told(cards: list[Card], wanted: str) -> tuple[Card | None, str]:
    """The card that lan_interface names. Bridges and VLANs have the MAC address of the card below them."""
    word = wanted.lower()
    by_name = [card for card in cards if card["name"].lower() == word]
    by_mac = [card for card in cards if word in (card["mac"].lower(), card["permanent_mac"].lower())]
    found = by_name or [card for card in by_mac if card["kind"] == "ethernet"] or by_mac
    if not found:
        return None, f"lan_interface is {wanted}, but it has no such network card. {listed(cards)}"
    return found[0], ""


def seen(cards: list[Card], address: str, network: Network) -> tuple[Card | None, str]:
    """The card that has the address or one in its network, else the only wired one with a link."""
    having = [card for card in cards if address in [str(known.ip) for known in addresses_of(card)]]
    # A Wi-Fi card may well be in the same network, at the same router.
    near = [
        card for card in cards if card["kind"] != "wifi" and any(a.ip in network for a in addresses_of(card))
    ]
    for found, what in ((having, address), (near, f"an address in {network}")):
        if found:
            card = one_of(found)
            return card, "" if card else f"several network cards have {what}. {TELL} {listed(cards)}"

    wired = [card for card in cards if card["kind"] == "ethernet"]
    linked = [card for card in wired if card["carrier"]]
    # Whether a cable leads somewhere is not known of a card that is switched off: beside one that carries the
    # way out (a home network?), it may well be the one that is meant.
    off = [card for card in wired if not card["up"]]
    if len(linked) == 1 and not (off and linked[0]["gateway"]):
        return linked[0], ""
    if not linked:
        return (
            None,
            f"no wired network card has a link: plug its cable in at both ends. {STAY} {listed(cards)}",
        )
    return None, f"it is not clear which of several network cards is the LAN's. {TELL} {listed(cards)}"


def lan_card(cards: list[Card], address: str, prefix: int, wanted: str = "") -> Card:
    """The LAN's card, with problem: '' or a sentence why there is none (its name is '' then).

    cards: as node_state sees them. address, prefix: what the node shall have. wanted: a name or a MAC address,
    which goes before anything that is seen. The card that carries the connection is no hint: a home card does so too.
    """
    network = ipaddress.ip_interface(f"{address}/{prefix}").network
    card, problem = told(cards, str(wanted)) if wanted else seen(cards, address, network)
    if card and card["kind"] != "ethernet":
        problem = (
            f"the LAN's network card would be {card['name']}, which is {KINDS.get(card['kind'], card['kind'])}; "
            f"only an ordinary wired card can be. {STAY} {listed(cards)}"
        )
    return {**(card if card and not problem else {"name": ""}), "problem": problem}


def gateway_problem(cards: list[Card], card: Card, gateway: str, address: str, prefix: int) -> str:
    """Why the card cannot have the default route to this gateway: '' or a sentence."""
    network = ipaddress.ip_interface(f"{address}/{prefix}").network
    if not gateway or not card["name"]:
        return ""
    if ipaddress.ip_address(gateway) not in network:
        return (
            f"the gateway {gateway} is not in {network}, the network of {address}. "
            'Set lan_gateway to the router\'s address in that network, or to "" when there is no way out of it.'
        )
    others = [
        other for other in cards
        if other["name"] != card["name"] and other["gateway"] not in ("", gateway)
    ]  # fmt: skip
    if not others or card["gateway"] == gateway:
        return ""
    ways = " and ".join(f"{other['name']} (over {other['gateway']})" for other in others)
    return (
        f"{ways} already has the default route, and lan_gateway ({gateway}) would put a second one on {card['name']}. "
        'To keep the way out as it is: lan_gateway: "" for this node in hosts.yml. '
        f"To have it over {card['name']}: take it away from {' and '.join(other['name'] for other in others)} first."
    )


def lan_network(address: str) -> str:
    """192.168.50.20/24 → 192.168.50.0/24"""
    return str(ipaddress.ip_interface(address).network)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"lan_card": lan_card, "lan_gateway_problem": gateway_problem, "lan_network": lan_network}
