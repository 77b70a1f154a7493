"""Reading files on a node, and what kind of machine it is."""

from __future__ import annotations

import os
import platform


def read_file(path: str) -> str:
    """Its text without space at the ends; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def in_container() -> bool:
    """Whether the kernel, its command line and the cards on the bus are those of a host."""
    return any(map(os.path.exists, ("/run/systemd/container", "/.dockerenv", "/run/.containerenv")))


def in_wsl() -> bool:
    """Whether this is Linux under Windows (WSL 2), and not a container there. systemd takes WSL for a container."""
    if os.path.isdir("/run/WSL"):
        return True
    other = in_container() and read_file("/run/systemd/container") != "wsl"
    return "microsoft" in platform.release().lower() and not other
