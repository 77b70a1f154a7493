"""What stands in the way of the firewall."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    said = lists(settings) or way_in(settings, node)
    has = addresses(node)
    if settings["address_is_there"] and settings["address"] not in has:
        said.append(
            f"no network card there has the address {settings['address']} (lan_address). It has {', '.join(has)}: name "
            f"one of these, and public_address: {settings['address']} beside it where one comes to it by that one."
        )
    if node["ufw"]:
        said.append(
            "ufw is active there, and two firewalls would contradict each other. Switch it off (sudo ufw disable) and "
            "run this again."
        )
    if node["firewalld"]:
        said.append(
            "firewalld is active there, and two firewalls would contradict each other. Switch it off (sudo systemctl "
            "disable --now firewalld) and run this again."
        )
    return said


def lists(settings: Seen) -> list[str]:
    peers, admins = settings["peers"], settings["admin_networks"]
    said = []
    if not peers:
        said.append(
            "firewall_peers is empty: no node could reach another one. It names the addresses of all nodes."
        )
    if not admins:
        said.append(
            "firewall_admin_networks is empty: nobody could log in any more. Name the network that you administer the "
            "nodes from (admin_networks)."
        )
    ports = [settings["ssh_port"], settings["tensorboard_port"]]
    for service in settings["lan_services"]:
        found = re.fullmatch(r"(?:tcp|udp)/(\d{1,5})(?:-(\d{1,5}))?", service)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= 65535:
            said.append(
                f"firewall_lan_services (lan_services) names {service}; it is like udp/5353 or tcp/47984-48010, with "
                "ports from 1 to 65535."
            )
        elif service.startswith("tcp/") and any(first <= port <= last for port in ports):
            only = "is for the admin networks only: admin_networks"
            said.append(f"firewall_lan_services (lan_services) names {service}, which {only}.")
    strange = [text for text in [*peers, *settings["members"], *admins] if not is_network(text)]
    return [*said, f"this is neither a network nor an address: {', '.join(strange)}."] if strange else said


def addresses(node: Seen) -> list[str]:
    """The IPv4 addresses of its cards."""
    found = [address.partition("/")[0] for card in node["cards"] for address in card["addresses"]]
    return [address for address in found if ":" not in address]


def way_in(settings: Seen, node: Seen) -> list[str]:
    """Before the node has its address (a check, --tags preflight), nobody knows from where another machine, the
    controller, will come. A person who has come to a controller that is this node stays where they are."""
    session, admins = node["session"], settings["admin_networks"]
    has = addresses(node)
    ports = [settings["ssh_port"], settings["tensorboard_port"], *settings["admin_ports"]]
    if session["client"] == "":
        return []
    said = []
    # The controller is this node itself: what counts is from where a person has come to it.
    by_itself = session["client"] == session["here"]
    person = settings["person"] if by_itself else session["client"]
    if by_itself and (not is_network(person) or ipaddress.ip_address(person).is_loopback or person in has):
        person = ""
    if (
        person
        and (by_itself or settings["address"] in has)
        and not any(ipaddress.ip_address(person) in ipaddress.ip_network(one, strict=False) for one in admins)
    ):
        said.append(
            f"you are connected from {person}, which is not in the admin networks ({', '.join(admins)}): the firewall "
            "would lock you out. Add your network to admin_networks."
        )
    if session["port"] not in ports:
        said.append(
            f"you are connected to port {session['port']}, but the firewall would let SSH in at port "
            f"{settings['ssh_port']} only: it would lock you out. Set firewall_ssh_port (ssh_port), or leave the old "
            "port open for now (firewall_admin_ports)."
        )
    return said


def is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
