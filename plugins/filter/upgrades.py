"""What apt would upgrade on a node, and whether a kernel would come without its NVIDIA driver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Upgrade = Mapping[str, Any]  # see parse_upgrades

# How the names begin of what playbooks/upgrade.yml alone moves. A kernel without its NVIDIA module is a PC without a
# GPU; a container engine that is replaced ends its containers. unattended-upgrades is told the same (role base).
TOGETHER = re.compile(
    r"linux-(?:image|headers|modules|objects|signatures|generic|virtual|lowlatency|oem|tools|cloud-tools|hwe)"
    r"|(?:lib)?nvidia-|xserver-xorg-video-nvidia|cuda-drivers|docker|containerd"
)
# Inst NAME [INSTALLED] (CANDIDATE ORIGIN, ORIGIN [ARCHITECTURE])
LINE = re.compile(r"^Inst (\S+)(?: \[([^\]]*)\])? \((\S+) ([^)]*)\)", re.MULTILINE)


def parse_upgrades(simulation: str, without_holds: str) -> list[dict[str, Any]]:
    """The upgrades that apt makes, and after them those that it would make as well if nothing were held.

    simulation: what apt-get --simulate upgrade prints. without_holds: the same with --ignore-hold. Each upgrade has
    package, installed ("" where it is new), candidate, security, together (whether upgrade.yml alone moves it) and
    held (whether a hold keeps it: its own, or that of a package that it needs).
    """
    moves = LINE.findall(simulation)
    kept = [found for found in LINE.findall(without_holds) if found[0] not in {name for name, *_ in moves}]
    return [
        {
            "package": package, "installed": installed, "candidate": candidate,
            "together": bool(TOGETHER.match(package)),
            "security": "security" in origins.lower(), "held": number >= len(moves),
        }
        for number, (package, installed, candidate, origins) in enumerate(moves + kept)
    ]  # fmt: skip


def kernels_without_driver(upgrades: Iterable[Upgrade], installed: Iterable[str]) -> list[str]:
    """The new kernels for which this upgrade brings no NVIDIA module, on a node that has its driver as prebuilt ones.

    Only what moves counts: a kernel that is held does not come, and a module that is held does not come with it.
    installed: names of packages; with a dkms package, modules are built as needed.
    """
    there = set(installed)
    if any(name.startswith("nvidia-dkms-") for name in there):
        return []
    if not any(name.startswith("linux-modules-nvidia-") for name in there):
        return []
    new = [one for one in upgrades if not one["held"]]
    modules = [
        name for name in there | {one["package"] for one in new} if name.startswith("linux-modules-nvidia-")
    ]
    kernels = [
        re.match(r"linux-image-(?:unsigned-)?(\d.*)", one["package"]) for one in new if not one["installed"]
    ]
    return [
        kernel[1]
        for kernel in kernels
        if kernel and not any(name.endswith(f"-{kernel[1]}") for name in modules)
    ]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"kernels_without_driver": kernels_without_driver, "parse_upgrades": parse_upgrades}
