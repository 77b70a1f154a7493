"""What an SSH server says to whoever asks and does not log in. (Filters, so that other plugins find them.)"""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Sequence

KINDS = ("ed25519", "ecdsa", "rsa")  # the best one first


def ssh_host_key(
    address: str, port: int, kinds: Sequence[str] = KINDS, patience: int = 20
) -> tuple[str, str]:
    """The first of these kinds that the server has, and that key (in base64); empty where it shows none in time [s]."""
    for kind in kinds:
        command = ["ssh-keyscan", "-T", str(patience), "-p", str(port), "-t", kind, address]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for words in (line.split() for line in said.splitlines() if not line.startswith("#")):
            if len(words) >= 3:
                return words[1], words[2]
    return "", ""


def ssh_fingerprint(public: str) -> str:
    """As ssh-keygen -l says it."""
    digest = hashlib.sha256(base64.b64decode(public)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "ssh_fingerprint": ssh_fingerprint,
            "ssh_host_key": ssh_host_key,
        }
