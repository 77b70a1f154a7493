"""What stands in the way of telling a person."""

from __future__ import annotations

from typing import Any

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    said = []
    if settings["heartbeat_seconds"] < 1:
        said.append(f"notify_heartbeat_seconds is {settings['heartbeat_seconds']}: it has to be at least 1.")
    if settings["nodes"] and settings["name"] not in settings["nodes"]:
        said.append(f"{settings['name']} is not in notify_nodes.")
    if not settings["services"] and not settings["heartbeat_url"]:
        said.append("nobody is named who could be told: webhooks or heartbeat_url.")
    return said
