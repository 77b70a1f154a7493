"""What stands in the way of an overlay."""

from __future__ import annotations

import ipaddress
from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    room = filter_loader.get("overlay_network_problem").j2_function(settings["network"], settings["prefix"])
    said = [room] if room else overlaps(settings, node)
    if settings["strangers"]:
        said.append(
            f"an overlay joins PCs of one LAN, with a Linux of their own; {', '.join(settings['strangers'])} is none "
            "(Windows, or public_address). Take overlay: true out of settings.yml."
        )
    if not node["modules"]["wireguard"]:
        said.append(
            "its kernel has no module wireguard, without which there is no overlay. Install the distribution's own "
            "kernel (a container has its machine's), or take overlay: true out of settings.yml."
        )
    if not 0 < settings["port"] < 65536:
        said.append(f"overlay_port is {settings['port']}; a port is a number from 1 to 65535.")
    return said


def overlaps(settings: Seen, node: Seen) -> list[str]:
    """Where its part of the overlay's network is in use already: by the LAN, by a card that is not the overlay's."""
    own = next(iter(settings["addresses"].values()), "")
    ours = ipaddress.ip_interface(f"{own}/{settings['prefix']}").network if own else None
    # Whoever comes over a router would be answered into the overlay.
    client = node["session"]["client"].partition("%")[0]
    used = [("the machine that you come from", client)] if client else []
    used += [("the LAN", f"{one}/{settings['prefix']}") for one in settings["endpoints"].values() if one][:1]
    used += [
        (f"its card {card['name']}", address.partition("%")[0])
        for card in node["cards"]
        if card["name"] != settings["card"]
        for address in card["addresses"]
    ]
    found = {
        what: str(network)
        for what, text in used
        if ours and (network := ipaddress.ip_interface(text).network).version == 4 and network.overlaps(ours)
    }
    return [
        f"the overlay would have {ours}, which is in use: {what} has {network}. Name another overlay_network in "
        "settings.yml."
        for what, network in found.items()
    ]
