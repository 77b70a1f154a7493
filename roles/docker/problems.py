"""What stands in the way of Docker, and of a node's cards in its containers."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

Seen = dict[str, Any]
DAEMON = "/etc/docker/daemon.json"
LIST = "/etc/apt/sources.list.d/aura-nvidia-container-toolkit.list"
BRIDGE = "172.17.0.0/16"  # Docker's own, unless somebody says another


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    said = []
    there = any(node["files"][path]["kind"] != "absent" for path in ("/usr/bin/dockerd", "/usr/sbin/dockerd"))
    if node["files"]["/snap/docker/current"]["kind"] != "absent" and not there:
        said.append(
            "Docker is there as a snap, which sees neither /var/lib/aura nor the graphics cards. Take it away: sudo "
            "snap remove docker."
        )
    client = node["session"]["client"].partition("%")[0]
    if client and not there and "bip" not in node["texts"][DAEMON] and is_in_bridge(client):
        said.append(
            f"you come from {client}, and Docker would take {BRIDGE} for its own bridge: no answer would reach you any "
            f'more. Say another one before, in {DAEMON}: {{"bip": "10.199.0.1/24"}}.'
        )
    gpu = node["gpu"]
    if settings["cards"] and gpu["cards"] and not gpu["elsewhere"]:
        said += of_toolkit(settings, node)
    return said


def is_in_bridge(address: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(BRIDGE)


def of_toolkit(settings: Seen, node: Seen) -> list[str]:
    said = []
    comes = "nvidia-container-toolkit" in node["missing"] or node["texts"][LIST]
    if comes and not (settings["toolkit_source"] and settings["toolkit_key"]):
        said.append(
            "nobody has said where its container toolkit comes from. Put nvidia_container_toolkit_source and "
            "nvidia_container_toolkit_key, as NVIDIA's guide to the installation names them, into settings.yml, or "
            "docker_cards: false."
        )
    try:
        daemon = json.loads(node["texts"][DAEMON] or "{}")
    except ValueError:
        daemon = None
    docker, file = node["units"]["docker.service"], node["files"][DAEMON]
    if not isinstance(daemon, dict):
        said.append(
            f"{DAEMON} is no JSON object, so Docker itself would not start again. Mend it, or delete it."
        )
        return said
    told = daemon.get("features", {}).get("cdi") is True or "nvidia" in daemon.get("runtimes", {})
    unread = docker["active"] and docker["started"] < file["mtime"] <= node["now"]
    if node["units"]["aura-train@0.service"]["active"] and (not told or unread):
        said.append(
            "a run is active there, and Docker cannot be started again under it. End it first: ansible-playbook "
            "playbooks/stop.yml."
        )
    return said
