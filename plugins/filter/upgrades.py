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
PREBUILT = re.compile(r"linux-modules-nvidia-")
KERNEL = re.compile(r"linux-image-(?:unsigned-)?(\d.*)")
NEEDS_REBOOT = re.compile(r"linux-(image|modules)|(lib)?nvidia")


def parse_simulation(text: str) -> list[dict[str, Any]]:
    """From what apt-get --simulate prints; see parse_upgrades."""
    return [
        {
            "package": package,
            "installed": installed,
            "candidate": candidate,
            "security": "security" in origins.lower(),
            "together": bool(TOGETHER.match(package)),
        }
        for package, installed, candidate, origins in LINE.findall(text)
    ]


def parse_upgrades(simulation: str, without_holds: str) -> list[dict[str, Any]]:
    """The upgrades that apt makes, and after them those that it would make as well if nothing were held.

    simulation: what apt-get --simulate upgrade prints. without_holds: the same with --ignore-hold. Each upgrade has
    package, installed ("" where it is new), candidate, security, together (whether upgrade.yml alone moves it) and
    held (whether a hold keeps it: its own, or that of a package that it needs).
    """
    moves = parse_simulation(simulation)
    names = {one["package"] for one in moves}
    kept = [one for one in parse_simulation(without_holds) if one["package"] not in names]
    return [{**one, "held": False} for one in moves] + [{**one, "held": True} for one in kept]


def moved_packages(before: Iterable[Upgrade], after: Iterable[Upgrade] = ()) -> list[str]:
    """The packages that an upgrade has moved: what waited before it, and neither was held nor waits after it."""
    left = {one["package"] for one in after}
    return [one["package"] for one in before if not one["held"] and one["package"] not in left]


def need_reboot(packages: Iterable[str]) -> bool:
    """Whether a kernel or a part of the driver is among them."""
    return any(map(NEEDS_REBOOT.match, packages))


def kernels_without_driver(upgrades: Iterable[Upgrade], installed: Iterable[str]) -> list[str]:
    """The new kernels for which this upgrade brings no NVIDIA module, on a node that has its driver as prebuilt ones.

    Only what moves counts: a kernel that is held does not come, and a module that is held does not come with it.
    installed: names of packages; with a dkms package, modules are built as needed.
    """
    moves = [one for one in upgrades if not one["held"]]
    packages = list(installed)
    if not any(map(PREBUILT.match, packages)) or any(name.startswith("nvidia-dkms-") for name in packages):
        return []
    new = [found[1] for one in moves if not one["installed"] and (found := KERNEL.fullmatch(one["package"]))]
    modules = [name for name in [*packages, *(one["package"] for one in moves)] if PREBUILT.match(name)]
    return [kernel for kernel in new if not any(name.endswith(f"-{kernel}") for name in modules)]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "kernels_without_driver": kernels_without_driver,
            "moved_packages": moved_packages,
            "need_reboot": need_reboot,
            "parse_upgrades": parse_upgrades,
        }
