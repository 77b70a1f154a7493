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
        return {"wsl_conf": wsl_conf, "powershell": powershell, "ports_but": ports_but}
