"""What sshd of a node shall be and is, and whose keys open it (role sshd)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ansible.plugins.loader import filter_loader


def public_key(told: str) -> str:
    """told: a key, or a file on the controller that holds one; '' where there is neither."""
    if told == "" or re.match(r"(ssh|ecdsa|sk)-[^ /]+ ", told):
        return told
    path = Path(told).expanduser()
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def key_blobs(text: str) -> list[str]:
    """The keys of an authorized_keys, without their types and comments."""
    return list(dict.fromkeys(re.findall(r"(?m)^[^#\n]*?(AAAA[A-Za-z0-9+/=]+)", text)))


def sshd_difference(seen: dict[str, Any], files: list[dict[str, Any]]) -> str:
    """What is not as it should be, in words; empty when nothing has to be done.

    seen: what node_state has seen. files: as safe_change takes them, the settings first.
    """
    as_it_shall_be = filter_loader.get("as_it_shall_be").j2_function
    for file in files:
        if not as_it_shall_be(file, seen["files"][file["path"]]):
            return f"{file['path']} {'shall not be there' if file.get('absent') else 'is another one'}"
    # What sshd makes of its settings: other files may say something else.
    for line in files[0]["content"].splitlines():
        keyword, _, value = line.partition(" ")
        has = seen["sshd"].get(keyword.lower(), [])
        if keyword not in ("#", "Port") and has != [value]:
            return f"sshd has {keyword} {' '.join(has)}, and shall have {value}"
    return ""


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"key_blobs": key_blobs, "public_key": public_key, "sshd_difference": sshd_difference}
