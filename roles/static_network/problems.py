"""What stands in the way of the node's address: which card it is, and what else is on it."""

from __future__ import annotations

from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    found: list[str] = filter_loader.get("network_plan").j2_function(node, settings)["problems"]
    return found
