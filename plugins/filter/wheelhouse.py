"""Which wheelhouse a node gets, and what of it the controller has."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# Systems with a good Python 3.11 of their own. Elsewhere a standalone one is brought along: jammy's is a release
# candidate, and noble has 3.12.
SYSTEM_PYTHON = {"Debian 12": "/usr/bin/python3.11"}


def text_of(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8").rstrip()


def wheelhouse(build: str, system: str, requirements: str, cache: str, script: str) -> dict[str, str]:
    """What a node with this system ("Debian 12") needs for this build of torch.

    python: its path on the node; kind: whose that is. lock: torch's hashes, in the cache where this repository has none
    for the build. name, directory (on the controller): they follow from what is in the wheelhouse and from the script
    that fetches it, so that a changed one never meets old wheels.
    """
    folder = Path(requirements).parent
    kind = "system" if system in SYSTEM_PYTHON else "standalone"
    found = re.search(r"^torch==(.*)$", text_of(folder / "torch.in"), re.MULTILINE)
    version = found[1] if found else ""
    ours = folder / f"torch-{build}.txt"
    torch = text_of(ours) if ours.is_file() else version + build
    name = hashlib.sha256((text_of(requirements) + text_of(script) + torch + kind).encode()).hexdigest()[:12]
    return {
        "build": build,
        "kind": kind,
        "python": SYSTEM_PYTHON.get(system, "/opt/aura/wheelhouse/python/bin/python3.11"),
        "lock": str(ours) if ours.is_file() else f"{cache}/torch-{version}-{build}.txt",
        "name": name,
        "directory": f"{cache}/wheelhouse-{name}",
    }


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"wheelhouse": wheelhouse}
