"""How a directory is shared, in what node_state has seen of a node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Seen = dict[str, Any]


def nfs_exported_otherwise(seen: Seen, directory: str, clients: Sequence[str], options: Sequence[str]) -> str:
    """What is wrong: not by version 4 alone, or not to these addresses with these options; '' when nothing is."""
    if not re.match(r"(-2 )?-3 \+4", seen["texts"]["/proc/fs/nfsd/versions"]):
        versions = seen["texts"]["/proc/fs/nfsd/versions"].strip()
        return (
            f"the kernel there serves the versions {versions}"
            if versions
            else "the kernel there serves nothing"
        )
    exported = re.findall(
        rf"(?m)^{re.escape(directory)}\t(\S+)\((\S*)\)$", seen["texts"]["/var/lib/nfs/etab"]
    )
    if sorted(client for client, _ in exported) != sorted(clients) or not all(
        set(options) <= set(given.split(",")) for _, given in exported
    ):
        return f"it is exported to {' '.join(f'{client}({given})' for client, given in exported) or 'nobody'}"
    return ""


def nfs_others(etab: str, exports: str, ours: str) -> list[str]:
    """The directories that are exported, or would be by /etc/exports, but for those that our own file names."""
    own = re.findall(r"(?m)^(/\S+)", ours)
    found = [*re.findall(r"(?m)^(/[^\t]*)\t", etab), *re.findall(r"(?m)^\s*\"?(/[^\s\"]+)", exports)]
    return [directory for directory in found if directory not in own]


def nfs_mounted(seen: Seen, directory: str, source: str, unit: str) -> bool:
    """Whether it is mounted from there, as its unit says now."""
    mount = seen["mounts"][directory]
    right = mount["mounted"] and mount["source"] == source and {"nosuid", "nodev"} <= set(mount["options"])
    return bool(right) and not seen["units"][unit]["stale"]


def nfs_off(said: Sequence[str]) -> bool:
    """Whether the node could not mount it because its server is silent. said: what shared-directory and mount have."""
    return bool(said) and re.search(r" does not answer \(port \d+\); ", said[-1]) is not None


def nfs_host(source: str) -> str:
    """Who serves it: 192.168.50.20 of 192.168.50.20:/srv/aura, nas of //nas/aura."""
    return re.split(r"[:/]", source.removeprefix("//"))[0]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "nfs_exported_otherwise": nfs_exported_otherwise,
            "nfs_others": nfs_others,
            "nfs_mounted": nfs_mounted,
            "nfs_off": nfs_off,
            "nfs_host": nfs_host,
        }
