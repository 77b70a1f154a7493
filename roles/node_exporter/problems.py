"""What stands in the way of the figures for Prometheus."""

from __future__ import annotations

from typing import Any

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    said = []
    if not settings["password"]:
        said.append(
            "node_exporter_password is empty: anybody who reaches the port would read the figures. Put one into the "
            "vault (docs/operations.md)."
        )
    elif len(settings["password"]) > 72:
        said.append("node_exporter_password is longer than 72 characters, which is all that bcrypt looks at.")
    if not 0 < settings["port"] < 65536:
        said.append(f"node_exporter_port is {settings['port']}; a port is a number from 1 to 65535.")
    return said
