"""What stands in the way of a build of torch on a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]
# Gigabytes below /opt for the wheels and what is unpacked from them, with room for one more release. An estimate.
NEEDED = {"cpu": 2, "cuda": 14}


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    torch_build = filter_loader.get("torch_build").j2_function
    coming = settings["driver"] or (node["gpu"].get("machine") or {}).get("installed", "")
    chosen = torch_build(node["gpu"], settings["torch_backend"], settings["cards"], coming)
    said = (
        [f"{chosen['problem']}. Its Python and its torch were left as they are."] if chosen["problem"] else []
    )
    return [*said, *room(chosen["build"] or "cpu", settings["requirements"], node)]


def room(build: str, requirements: str, node: Seen) -> list[str]:
    """A node that has these wheels is not asked again: it may well train on a disk that is nearly full."""
    needed = NEEDED["cpu" if build == "cpu" else "cuda"]
    left = node["mounts"]["/opt"]["free"] / 1e9
    system = f"{node['distribution']} {node['distribution_major_version']}"
    wheelhouse = filter_loader.get("wheelhouse").j2_function
    wanted = wheelhouse(build, system, requirements, "", Path(__file__).parent / "files/download-wheelhouse")
    if left >= needed or node["texts"]["/opt/aura/wheelhouse.complete"] == wanted["name"]:
        return []
    return [
        f"has {left:.1f} GB free for /opt, and Python, torch and its releases need about {needed} GB there. Make room "
        "(sudo apt-get clean; du -xh / | sort -h | tail)."
    ]
