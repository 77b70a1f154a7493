"""What Linux under Windows is told (/etc/wsl.conf), from what it is told already; words and ports for PowerShell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SECTION = re.compile(r"\s*\[\s*([^\]]+?)\s*\]")
SETTING = re.compile(r"\s*([\w.]+)\s*=")


def wsl_conf(text: str, wanted: Mapping[str, Mapping[str, str]]) -> str:
    """The file with these settings, by section; all others stay, with their comments. Case does not count."""
    # Lines in their sections; what stands before the first one has none.
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines():
        found = SECTION.match(line)
        if found:
            sections.append((found[1].lower(), [line]))
        else:
            sections[-1][1].append(line)
    for name, settings in wanted.items():
        own = [lines for section, lines in sections if section == name.lower()]
        if not own:
            own = [[f"[{name}]"]]
            sections.append((name.lower(), own[0]))
        for key, value in settings.items():
            _set(own, key, value)
    blocks = ["\n".join(lines).strip() for _, lines in sections]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _set(blocks: list[list[str]], key: str, value: str) -> None:
    """Once in the first of these blocks, at its old place where it has one, and nowhere else."""
    line, place = f"{key}={value}", None
    for block in blocks:
        for number in reversed(range(len(block))):
            found = SETTING.match(block[number])
            if found and found[1].lower() == key.lower():
                del block[number]
                place = number if block is blocks[0] else place
    while place is None and len(blocks[0]) > 1 and not blocks[0][-1].strip():
        blocks[0].pop()
    blocks[0].insert(len(blocks[0]) if place is None else place, line)


def wsl_command(address: str, prefix: int, gateway: str) -> str:
    """What Linux types when it starts, to have its address on a switch of its own."""
    route = f" && ip route replace default via {gateway}" if gateway else ""
    return f"ip address replace {address}/{prefix} dev eth0 && ip link set eth0 up{route}"


def wsl_stranger(name: str, wsl: bool, group: bool) -> str:
    """Why a node is not what the group `wsl` says; empty when it is. wsl: what it is; group: whether it is in it."""
    if wsl and not group:
        return (
            f"{name} is Linux under Windows (WSL), where Windows has the network card, the graphics driver and the "
            f"clock. Name it in the group `wsl` of hosts.yml too (wsl: {{hosts: {{{name}: {{}}}}}}); docs/windows.md "
            "says the rest."
        )
    if group and not wsl:
        return f"{name} is in the group `wsl` of hosts.yml, but it is no Linux under Windows: take it out of there."
    return ""


def wsl_setting(networking: str, memory: str, distribution: str, admin_networks: list[str]) -> str:
    """What cannot be told to Windows, all in one text; empty when all can."""
    said = []
    if networking not in ("mirrored", "switch"):
        said.append(f"wsl_networking is {networking}: it is mirrored (Windows 11) or switch (Windows 10).")
    if memory and not re.fullmatch(r"[1-9][0-9]*(MB|GB)", memory):
        said.append(f"wsl_memory is {memory}, which WSL does not take for a size: write 24GB or 8000MB, say.")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", distribution):
        said.append(
            f"wsl_distribution is {distribution}, which is no name of a WSL system: wsl --list in PowerShell has them."
        )
    if not admin_networks:
        said.append(
            "admin_networks is empty: nobody could log in. Name the network that you administer the nodes from."
        )
    return " ".join(said)


def powershell(words: str | Iterable[object]) -> str:
    """A text, or a list of texts, as PowerShell reads it literally."""
    several = [words] if isinstance(words, str) else words
    return ",".join("'" + str(word).replace("'", "''") + "'" for word in several)


def ports_but(closed: Iterable[int]) -> list[str]:
    """All TCP ports but these, as ranges: 1-21, 23-65535."""
    ranges, first = [], 1
    for port in [*sorted(set(map(int, closed))), 65536]:
        if first < port:
            ranges.append(f"{first}-{port - 1}" if first < port - 1 else str(first))
        first = port + 1
    return ranges


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "wsl_conf": wsl_conf, "wsl_command": wsl_command, "wsl_stranger": wsl_stranger, "wsl_setting": wsl_setting,
            "powershell": powershell, "ports_but": ports_but,
        }  # fmt: skip
