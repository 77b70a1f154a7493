"""Reading files and the output of programs on a node."""

from __future__ import annotations

import os
import subprocess


def read_file(path: str) -> str:
    """Its text without space at the ends; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_output(*command: str, strict: bool = False, timeout: int = 60) -> str:
    """What a program prints; empty where there is none, it takes longer [s], or (strict) it fails."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            timeout=timeout, check=strict, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
