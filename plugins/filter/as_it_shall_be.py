"""Whether a file of a node is the one that a role wants there."""

from __future__ import annotations

import hashlib
from typing import Any


def as_it_shall_be(file: dict[str, Any], seen: dict[str, Any]) -> bool:
    """file: as write_files takes it. seen: what node_state says of its path."""
    if file.get("absent"):
        return seen["kind"] == "absent" and not file.get("original")
    if "link" in file:
        return seen["kind"] == "link" and seen["target"] == file["link"]
    owner = file.get("owner", "root")
    is_directory = bool(file.get("directory"))
    wanted = {
        "kind": "directory" if is_directory else "file",
        "mode": file.get("mode") or ("0755" if is_directory else "0644"),
        "owner": owner,
        "group": file.get("group") or owner,
    }
    if not is_directory:
        wanted["sha256"] = hashlib.sha256(file["content"].encode(errors="surrogateescape")).hexdigest()
    return all(seen[key] == value for key, value in wanted.items())


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"as_it_shall_be": as_it_shall_be}
