"""Whether an upgrade may be made, from what apt would do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

PREBUILT = re.compile(r"linux-modules-nvidia-")
KERNEL = re.compile(r"linux-image-(?:unsigned-)?(\d.*)")


def kernels_without_driver(upgrades: Iterable[Mapping[str, object]], installed: Iterable[str]) -> list[str]:
    """The new kernels for which this upgrade brings no NVIDIA module, on a node that has its driver as prebuilt ones.

    upgrades: as node_state says them. installed: names of packages; with a dkms package, modules are built as needed.
    """
    names = [str(one["package"]) for one in upgrades]
    packages = list(installed)
    if not any(map(PREBUILT.match, packages)) or any(name.startswith("nvidia-dkms-") for name in packages):
        return []
    new = [
        found[1]
        for one in upgrades
        if not one["installed"] and (found := KERNEL.fullmatch(str(one["package"])))
    ]
    modules = [name for name in [*names, *packages] if PREBUILT.match(name)]
    return [kernel for kernel in new if not any(name.endswith(f"-{kernel}") for name in modules)]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"kernels_without_driver": kernels_without_driver}
