"""Which packages of Docker a node lacks, and what its settings have to say for containers to get its cards."""

from __future__ import annotations

import json
import re
from typing import Any

Seen = dict[str, Any]
PROGRAMS = ("/usr/bin/dockerd", "/usr/sbin/dockerd")  # Debian's is in the second


def docker_packages(node: Seen) -> list[str]:
    """Docker Engine and compose. A Docker that is there stays: its packages would have to go, with all containers."""
    there = any(node["files"][path]["kind"] != "absent" for path in PROGRAMS)
    if there and "docker.io" in node["missing"]:
        return []
    return ["docker.io", "docker-compose-v2" if node["distribution"] == "Ubuntu" else "docker-compose"]


def docker_takes_cdi(text: str, said: str) -> bool:
    """Whether this Docker shall read descriptions of devices, as it does from 25 on; not where somebody has given it
    NVIDIA's runtime already, nor where the toolkit does not write them. text: of /etc/docker/daemon.json; said: by
    `dockerd --version`, and of an old toolkit."""
    version = re.search(r"version (\d+)", said)
    known = bool(version and int(version[1]) >= 25) and "old toolkit" not in said
    return known and "nvidia" not in json.loads(text or "{}").get("runtimes", {})


def docker_daemon(text: str, cdi: bool) -> str:
    """/etc/docker/daemon.json with what gives cards to containers; whatever else is in it stays."""
    settings = json.loads(text or "{}")
    nvidia = {"args": [], "path": "nvidia-container-runtime"}  # as `nvidia-ctk runtime configure` writes it
    part, name, value = ("features", "cdi", True) if cdi else ("runtimes", "nvidia", nvidia)
    there = settings.setdefault(part, {})
    if name in there and (there[name] is True or not cdi):
        return text
    there[name] = value
    return json.dumps(settings, indent=4) + "\n"


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "docker_packages": docker_packages,
            "docker_takes_cdi": docker_takes_cdi,
            "docker_daemon": docker_daemon,
        }
