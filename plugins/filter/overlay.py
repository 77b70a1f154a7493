"""The addresses that nodes have in the overlay, and the keys by which they know each other (role overlay)."""

from __future__ import annotations

import ipaddress
import re

# 32 bytes in base64: what a node says is its key goes into the settings of all others, which root reads there.
KEY = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")


def overlay_address(address: str, prefix: int, network: str) -> str:
    """192.168.50.20, 24, 10.201.0.0/16 → 10.201.0.20: the same machine in the overlay's network, of the same size.

    "" where there is no such address; overlay_network_problem says why.
    """
    if overlay_network_problem(network, prefix):
        return ""
    try:
        host = int(ipaddress.IPv4Address(address)) & (2 ** (32 - int(prefix)) - 1)
    except ValueError:
        return ""
    return str(ipaddress.IPv4Network(network)[host])


def overlay_network_problem(network: str, prefix: int) -> str:
    """Why a LAN with this prefix has no room in the network; ''."""
    try:
        length = ipaddress.IPv4Network(network).prefixlen
    except ValueError:
        return f"overlay_network is {network}, which is no network: it is like 10.201.0.0/16."
    if length > int(prefix):
        return (
            f"overlay_network is {network}, which has no room for a LAN of /{prefix}: name one of /{prefix} or larger "
            "(a smaller figure)."
        )
    return ""


def overlay_key(text: str) -> str:
    """The public key in a text, or ""."""
    return text.strip() if KEY.fullmatch(text.strip()) else ""


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "overlay_address": overlay_address,
            "overlay_key": overlay_key,
            "overlay_network_problem": overlay_network_problem,
        }
