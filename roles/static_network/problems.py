"""What stands in the way of the node's address: which card it is, and what else is on it."""

from __future__ import annotations

from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    plan = filter_loader.get("network_plan").j2_function(node, settings)
    found: list[str] = plan["problems"]
    if "card" not in plan or not (found or plan["differs"]):
        return found
    card, gateway = plan["card"], settings["gateway"]
    router = node["owners"].get(gateway, {}).get(card["name"])
    # Whose way out is another one today is asked once it has its address.
    silent = node["silent"] if gateway and card["gateway"] == gateway else []
    problem = filter_loader.get("way_out_problem").j2_function(card["name"], gateway, router != "", silent)
    return [*found, problem] if problem else found
