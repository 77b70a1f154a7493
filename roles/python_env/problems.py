"""What stands in the way of a build of torch on a node."""

from __future__ import annotations

from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    torch_build = filter_loader.get("torch_build").j2_function
    coming = settings["driver"] or (node["gpu"].get("machine") or {}).get("installed", "")
    problem = torch_build(node["gpu"], settings["torch_backend"], settings["cards"], coming)["problem"]
    return [f"{problem}. Its Python and its torch were left as they are."] if problem else []
