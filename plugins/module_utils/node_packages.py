"""Packages of a node: which are missing, and which wait for playbooks/upgrade.yml, that moves them together."""

from __future__ import annotations

import os
import re
import subprocess

# How their names begin. A kernel without its NVIDIA module is a PC without a GPU; a container engine that is replaced
# ends its containers. unattended-upgrades is told the same (role base).
TOGETHER = re.compile(
    r"linux-(?:image|headers|modules|objects|signatures|generic|virtual|lowlatency|oem|tools|cloud-tools|hwe)"
    r"|(?:lib)?nvidia-|xserver-xorg-video-nvidia|cuda-drivers|docker|containerd"
)
# Inst NAME [INSTALLED] (CANDIDATE ORIGIN, ORIGIN [ARCHITECTURE])
LINE = re.compile(r"^Inst (\S+)(?: \[([^\]]*)\])? \((\S+) ([^)]*)\)", re.MULTILINE)


def said(*command: str, strict: bool = False, patience: int = 120) -> str:
    """What a command prints; nothing when it is not there, takes more than `patience` seconds or (strict) fails."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    try:
        answer = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            timeout=patience, check=strict, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def missing(packages: list[str]) -> list[str]:
    """Those that are not installed."""
    if not packages:
        return []
    lines = said("dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *packages)
    installed = {words[0] for words in map(str.split, lines.splitlines()) if words[1:] == ["installed"]}
    return [name for name in packages if name not in installed]


def waiting() -> list[dict[str, object]]:
    """What apt would upgrade now, if it has fresh lists: see upgrades, and `held`: whether a hold prevents it."""
    apt_get = ("apt-get", "--simulate", "--with-new-pkgs")
    return with_held(said(*apt_get, "upgrade"), said(*apt_get, "--ignore-hold", "upgrade"))


def with_held(simulation: str, without_holds: str) -> list[dict[str, object]]:
    """The upgrades that apt makes, and after them those that it would make as well if nothing were held.

    simulation: of the upgrade as playbooks/upgrade.yml makes it. without_holds: the same with --ignore-hold.
    """
    moves = upgrades(simulation)
    names = {one["package"] for one in moves}
    kept = [one for one in upgrades(without_holds) if one["package"] not in names]
    return [{**one, "held": False} for one in moves] + [{**one, "held": True} for one in kept]


def upgrades(simulation: str) -> list[dict[str, object]]:
    """package, installed ('' when it is new), candidate, security, and together: whether upgrade.yml alone moves it.

    simulation: what apt-get --simulate prints.
    """
    return [
        {
            "package": package,
            "installed": installed,
            "candidate": candidate,
            "security": "security" in origins.lower(),
            "together": bool(TOGETHER.match(package)),
        }
        for package, installed, candidate, origins in LINE.findall(simulation)
    ]
