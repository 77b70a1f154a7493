"""What apt would upgrade of the packages that only playbooks/upgrade.yml moves, all of them together."""

from __future__ import annotations

import re

# A kernel without its NVIDIA module is a PC without a GPU; a container engine that is replaced ends its containers.
TOGETHER = re.compile(
    r"linux-(?:(?:image|headers|modules|objects|signatures|main-modules|restricted-modules)(?:-.*)?"
    r"|(?:generic|lowlatency|virtual|oem|cloud|amd64|nvidia)(?:-.*)?)"
    r"|(?:lib)?nvidia-.*|cuda-drivers.*|xserver-xorg-video-nvidia.*"
    r"|docker.*|containerd.*|runc"
)
# Inst NAME [INSTALLED] (CANDIDATE ORIGIN, ORIGIN [ARCHITECTURE])
LINE = re.compile(r"^Inst (\S+)(?: \[([^\]]*)\])? \((\S+) ([^)]*)\)", re.MULTILINE)
SIMULATION = ("apt-get", "--simulate", "--with-new-pkgs", "--ignore-hold", "upgrade")


def upgrades(simulation: str) -> list[dict[str, object]]:
    """package, installed ('' when it is new), candidate, security; simulation: what apt-get --simulate prints."""
    return [
        {
            "package": package,
            "installed": installed,
            "candidate": candidate,
            "security": "security" in origins.lower(),
        }
        for package, installed, candidate, origins in LINE.findall(simulation)
        if TOGETHER.fullmatch(package)
    ]
