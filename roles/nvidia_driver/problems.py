"""What stands in the way of a driver for a node's cards."""

from __future__ import annotations

from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    decide = filter_loader.get("driver_decision").j2_function
    told = {name: settings[name] for name in ("branch", "power_limit")}
    problem = decide(node, **told)["problem"]
    return [problem] if problem else []
