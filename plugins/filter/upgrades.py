"""Whether an upgrade or a reboot may be made, from what apt would do and what the node is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Upgrade = Mapping[str, object]  # as node_state says it

PREBUILT = re.compile(r"linux-modules-nvidia-")
KERNEL = re.compile(r"linux-image-(?:unsigned-)?(\d.*)")


def kernels_without_driver(upgrades: Iterable[Upgrade], installed: Iterable[str]) -> list[str]:
    """The new kernels for which this upgrade brings no NVIDIA module, on a node that has its driver as prebuilt ones.

    Only what moves counts: a kernel that is held does not come, and a module that is held does not come with it.
    installed: names of packages; with a dkms package, modules are built as needed.
    """
    moves = [one for one in upgrades if not one["held"]]
    names = [str(one["package"]) for one in moves]
    packages = list(installed)
    if not any(map(PREBUILT.match, packages)) or any(name.startswith("nvidia-dkms-") for name in packages):
        return []
    new = [
        found[1] for one in moves if not one["installed"] and (found := KERNEL.fullmatch(str(one["package"])))
    ]
    modules = [name for name in [*names, *packages] if PREBUILT.match(name)]
    return [kernel for kernel in new if not any(name.endswith(f"-{kernel}") for name in modules)]


def moved(before: Iterable[Upgrade], after: Iterable[Upgrade]) -> list[str]:
    """The packages that an upgrade has moved: what waited before it, and neither was held nor waits after it."""
    left = {one["package"] for one in after}
    return [str(one["package"]) for one in before if not one["held"] and one["package"] not in left]


def no_return(seen: Mapping[str, Any], node: str, upgrade: bool = False) -> str:
    """Why this node must not be rebooted (upgrade: be upgraded, which may reboot it) from afar: empty when it may.

    seen: the answer of node_state. The controller's own node is rebooted by a person, who sits at it.
    """
    waits = seen["reboot_required"] or any(not one["held"] for one in seen["upgrades"])
    if seen["session"]["client"] == seen["session"]["here"] or (upgrade and not waits):
        return ""
    others = f"The others without it: --limit 'cluster:!{node}'."
    if seen["wsl"]:
        type_there = "sudo apt-get --with-new-pkgs upgrade in its Ubuntu, then " if upgrade else ""
        return (
            f"{node} is Linux under Windows (WSL), and only Windows starts it again. Sit down at it and type: "
            f"{type_there}wsl --shutdown in PowerShell, and open Ubuntu again. {others}"
        )
    if seen["start"]["live"]:
        return (
            f"{node} runs a live system (from a USB stick, say): after a reboot nothing of what was installed there "
            f"is left, this controller's key neither. Install its system on its disk. {others}"
        )
    if seen["start"]["passphrase"]:
        type_there = "sudo apt-get --with-new-pkgs upgrade && sudo reboot" if upgrade else "sudo reboot"
        return (
            f"One of the disks of {node} asks for a passphrase when it starts, so it would not come back by itself. "
            f"Sit down at it and type: {type_there}. {others}"
        )
    return ""


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"kernels_without_driver": kernels_without_driver, "moved": moved, "no_return": no_return}
