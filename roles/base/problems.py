"""What stands in the way of the service user, and of a place for runs and corpora."""

from __future__ import annotations

import re
from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]
HOME = "/var/lib/aura"
UNIT = "/etc/systemd/system/var-lib-aura.mount"
WITHOUT_OWNERS = ("vfat", "exfat", "ntfs", "ntfs3", "fuseblk")
OVER_THE_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    said = [*names(settings["uid"], node), *place(settings["data_directory"], settings["uid"], node)]
    directories = dict.fromkeys(
        (HOME, f"{HOME}/corpora", f"{HOME}/runs", "/opt/aura", settings["data_directory"])
    )
    said += [
        f"{path} is a link there (to {node['files'][path]['target']}), and has to be a directory. Take the link away "
        f"(sudo rm {path}). If runs and corpora shall lie on another disk, data_directory is the directory there."
        for path in directories
        if node["files"][path]["kind"] == "link"
    ]
    if not re.fullmatch(r"[1-9][0-9]*[KMGT]", settings["journal_max"]):
        said.append(
            f"base_journal_max is {settings['journal_max']}, which journald does not take for a size: write 500M or "
            "1G, say."
        )
    return said


def names(number: int, node: Seen) -> list[str]:
    taken = [one for one in node["taken"] if one["name"] != "aura"]
    user, group = node["users"].get("aura", {}).get("uid", number), node["groups"].get("aura", number)
    taken += [{"kind": "user", "name": "aura", "number": user}] if user != number else []
    taken += [{"kind": "group", "name": "aura", "number": group}] if group != number else []
    if not taken:
        return []
    who = "; ".join(f"{one['kind']} {one['name']} {one['number']}" for one in taken)
    return [
        f"there is already: {who} (name and number), but files that travel between the nodes need the user and the "
        f"group `aura` with number {number} everywhere. Give the other one another number there (usermod -u, "
        "groupmod -g), or choose a number that is free on every node: base_uid."
    ]


def place(directory: str, number: int, node: Seen) -> list[str]:
    """Another place for the data is a bind mount, so that every path, unit and program stays as it is."""
    if directory == HOME:
        elsewhere = node["files"][UNIT]["kind"] != "absent"
        return [
            f"{HOME} is another directory there ({UNIT}), and data_directory does not say so. Name that directory, "
            "or take the files back: sudo systemctl disable --now var-lib-aura.mount, delete that unit, copy the files."
        ] * elsewhere
    here, there, text = node["mounts"][HOME], node["mounts"][directory], node["texts"][UNIT]
    # Our unit says already that the data lie there, and in which file system.
    named = re.search(rf"^What={re.escape(directory)}$", text, re.MULTILINE)
    was_on = re.search(r"^AssertPathIsMountPoint=(.+)$", text, re.MULTILINE)
    misplaced = filter_loader.get("misplaced").j2_function
    # What is ours already is not asked about: a disk that is off has another owner there.
    if said := misplaced(directory, "data_directory", None if named else there, ["aura", str(number)]):
        return [said]
    if named and was_on and was_on[1] != there["where"]:
        return [
            f"data_directory {directory} lay in the file system at {was_on[1]}, and now lies in the one at "
            f"{there['where']}. Is its disk off? Mount it, or unmount what lies over it. If the data shall lie there "
            f"from now on: sudo systemctl disable --now var-lib-aura.mount, and delete {UNIT}."
        ]
    found, it = [], f"data_directory {directory} lies on {there['source']} ({there['type']})"
    if there["type"] in WITHOUT_OWNERS:
        found.append(
            f"{it}, where files have no owners. Format that disk with ext4 (sudo mkfs.ext4 deletes everything on it), "
            "or choose another place."
        )
    if there["type"] in OVER_THE_NETWORK:
        found.append(
            f"{it}: training would wait for the network with every checkpoint. Choose a disk of the node; "
            "shared_directory gets copies."
        )
    if here["used"] and not here["mounted"]:
        found.append(
            f"there are files in {HOME}, which would be hidden under {directory}. When no run is active: sudo rsync -a "
            f"{HOME}/ {directory}/ && sudo mv {HOME} {HOME}.before"
        )
    if here["mounted"] and not named:
        found.append(
            f"{HOME} is another directory there already. When no run is active, move its files, then: sudo systemctl "
            "stop var-lib-aura.mount"
        )
    return found
