"""What stands in the way of the nodes' names."""

from __future__ import annotations

from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    strangers = filter_loader.get("hosts_file_strangers").j2_function
    lines = strangers(node["texts"]["/etc/hosts"], settings["addresses"])
    if not lines:
        return []
    return [
        f"in /etc/hosts there, lines that are not ours lead names of nodes elsewhere: {'; '.join(lines)}. Take these "
        "names out of them."
    ]
