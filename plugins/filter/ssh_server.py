"""What an SSH server says to whoever asks and does not log in. (Filters, so that other plugins find them.)"""

from __future__ import annotations

import base64
import errno
import hashlib
import socket
import subprocess
from collections.abc import Sequence

KINDS = ("ed25519", "ecdsa", "rsa")  # the best one first
OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.EPERM, errno.EACCES)


def ssh_greeting(address: str, port: int, timeout: float, patience: float) -> tuple[str, bytes]:
    """What answers there, and its first words: `ssh`, `other` (not SSH), `refused` (a machine without a server on that
    port), `slow` (a connection, and then nothing in time) or `silence`. Raises OSError where this machine is at fault.

    timeout: for a connection, which a kernel makes; patience: for the words of a server that may be slow [s].
    """
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            connection.settimeout(patience)
            said = first_words(connection)
    except ConnectionRefusedError:
        return "refused", b""
    except OSError as error:
        if error.errno in OUR_OWN:
            raise
        return "silence", b""
    if said.startswith(b"SSH-"):
        return "ssh", said
    return "other" if said else "slow", said


def first_words(connection: socket.socket) -> bytes:
    """Empty where none come in time, or the server hangs up: sshd does so, too, when too many connect at once."""
    try:
        return connection.recv(255)
    except OSError:
        return b""


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
            "ssh_greeting": ssh_greeting,
            "ssh_host_key": ssh_host_key,
        }
