"""What stands in the way of a shared directory."""

from __future__ import annotations

import re
from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]
SERVICE = "/etc/systemd/system/aura-shared-directory.service"  # of who mounts it
SCRIPT = "aura-script.service"


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    said = []
    if settings["server_enabled"]:
        said += server(settings, node)
    if settings["client_enabled"]:
        said += [*source(settings), *place(settings, node), *numbers(settings, nodes)]
    is_off = not (settings["server_enabled"] or settings["client_enabled"])
    there = node.get("texts", {}).get(SERVICE, "")
    mount_moves = filter_loader.get("mount_moves").j2_function
    moves = settings["client_enabled"] and mount_moves(there, settings["directory"], settings["source"])
    if (is_off or moves) and node["files"][SERVICE]["kind"] != "absent" and node["units"][SCRIPT]["active"]:
        said.append(
            "somebody's script runs there, which may write into the shared directory that is to go. End it first: "
            "ansible-playbook playbooks/stop.yml"
        )
    return said


def misplaced(directory: str, there: Seen | None = None) -> list[str]:
    said = filter_loader.get("misplaced").j2_function(directory, "shared_directory", there)
    return [said] if said else []


def server(settings: Seen, node: Seen) -> list[str]:
    directory = settings["directory"]
    kind = node["files"][directory]["kind"]
    strange = [text for text in settings["clients"] if not re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", text)]
    # What we have mounted there from the server before goes first.
    there = None if mounted_by_us(node, directory) else node["mounts"][directory]
    said = misplaced(directory, there)
    if not settings["clients"]:
        said.append(
            "nfs_clients is empty: nobody could mount the shared directory. It names the addresses of the other nodes."
        )
    if strange:
        said.append(
            f"nfs_clients names {', '.join(strange)}, which is no IPv4 address. It names the addresses of the nodes, "
            "and neither networks nor names."
        )
    if not said and kind not in ("directory", "absent"):
        said.append(
            f"the shared directory {directory} is a {kind} there, and no directory. Choose another one "
            "(shared_directory), or move it away."
        )
    return said


def source(settings: Seen) -> list[str]:
    what, login = settings["source"], [settings["smb_user"], settings["smb_password"]]
    said = []
    if not re.fullmatch(r"([A-Za-z0-9.-]+:/|//[A-Za-z0-9.-]+/)[A-Za-z0-9_.$/-]*[A-Za-z0-9_.$-]", what):
        said.append(
            f"what shall be mounted is {what}, which is neither NFS (192.168.50.9:/volume1/aura) nor SMB "
            "(//192.168.50.9/aura), without spaces and without a / at its end (shared_source)."
        )
    if what.startswith("//") and "" in login:
        said.append(
            f"{what} is SMB and wants to know who we are: shared_smb_user, and shared_smb_password from the vault."
        )
    if "\n" in "".join([*login, settings["smb_domain"]]):
        said.append(f"the user, password or domain for {what} has a line break in it.")
    return said


def place(settings: Seen, node: Seen) -> list[str]:
    directory, mount = settings["directory"], node["mounts"][settings["directory"]]
    said = misplaced(directory)
    if said:
        return said
    if mount["mounted"] and mount["source"] != settings["source"] and not mounted_by_us(node, directory):
        return [
            f"{mount['source']} is mounted at {directory} there. Unmount it (sudo umount {directory}) and take it "
            "out of /etc/fstab, or choose another directory (shared_directory)."
        ]
    if not mount["mounted"] and not mount["empty"]:
        return [
            f"there is something in {directory}, which would be hidden under what is mounted there. Move it away "
            f"(sudo mv {directory} {directory}.local), or choose another directory (shared_directory)."
        ]
    return []


def mounted_by_us(node: Seen, directory: str) -> bool:
    """By an earlier run, maybe from another server."""
    name = directory[1:].replace("-", r"\x2d").replace("/", "-")
    unit = node["files"].get(f"/etc/systemd/system/{name}.mount", {})
    return unit.get("kind") == "file" and bool(node["mounts"][directory]["mounted"])


def numbers(settings: Seen, nodes: Seen) -> list[str]:
    """Who has which numbers where: a file keeps its owner's number, not the name. Only nodes that share it count."""
    said = []
    for user in settings["users"]:
        found: dict[str, list[str]] = {}
        for name, seen in nodes.items():
            if settings["directory"] in seen["mounts"] and user in seen["users"]:
                number = f"{seen['users'][user]['uid']}:{seen['users'][user]['gid']}"
                found.setdefault(number, []).append(name)
        if len(found) > 1:
            where = " and ".join(f"{number} on {', '.join(names)}" for number, names in found.items())
            said.append(
                f"the user {user} has the numbers {where}: a shared file keeps its owner's number, so it would be "
                "somebody else's on another node. Give each user the same numbers everywhere (usermod -u, groupmod -g)."
            )
    return said
