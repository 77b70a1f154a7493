"""Whether this machine comes back from a restart by itself, and with what was installed before it."""

from __future__ import annotations

import os
import platform
import re

from ansible.module_utils.node_network import read


def in_container() -> bool:
    """Whether the kernel, its command line and the cards on the bus are those of a host."""
    return any(map(os.path.exists, ("/run/systemd/container", "/.dockerenv", "/run/.containerenv")))


def in_wsl() -> bool:
    """Whether this is Linux under Windows (WSL 2), and not a container there.

    /run/WSL is where Windows's own programs are called, with whatever kernel. systemd takes WSL for a container.
    """
    if os.path.isdir("/run/WSL"):
        return True
    other = in_container() and read("/run/systemd/container") != "wsl"
    return "microsoft" in platform.release().lower() and not other


def asks_passphrase(crypttab: str) -> bool:
    """Whether a disk is opened by a person at boot: no key file, and nothing else that opens it.

    A FIDO2 key is no such thing: unless told otherwise it wants to be touched.
    """
    for line in crypttab.splitlines():
        words = line.split("#")[0].split()
        if len(words) < 2:
            continue
        key = words[2] if len(words) > 2 else "none"
        options = words[3] if len(words) > 3 else ""
        by_itself = re.search(r"(^|,)(noauto|tpm2-device=|keyscript=)", options)
        if key in ("none", "-") and not by_itself:
            return True
    return False


def is_live(command_line: str) -> bool:
    """Whether the kernel was started by a medium (a USB stick, say) whose system forgets."""
    return bool(re.search(r"\bboot=(casper|live)\b|/casper/|/live/vmlinuz", command_line))


def start() -> dict[str, bool]:
    """`passphrase`: a person has to open a disk. `live`: what was installed is gone afterwards."""
    return {
        "passphrase": asks_passphrase(read("/etc/crypttab")),
        "live": not in_container() and is_live(read("/proc/cmdline")),
    }
