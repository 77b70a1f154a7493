"""What `aura watch` has found out about a GPU, where the rank that trains on it looks: <directory>/<uuid>.json.

The directory is in memory (/run/aura-watch): a restart of the machine forgets it, as it forgets most such faults.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from aura.durable import write_atomically
from aura.errors import GpuFault, reason_of

VARIABLE = "AURA_FAULTS"  # of a rank: the directory; without it nobody looks
PROCESSOR = "cpu"  # in place of a UUID, where a rank has no GPU


def directory_of_faults() -> Path | None:
    return Path(named) if (named := os.environ.get(VARIABLE)) else None


def write_fault(directory: Path, uuid: str, content: dict[str, Any]) -> None:
    """`content`: `sentence` and `remedy` for a person, and what else is known. Raises OSError."""
    write_atomically(directory / f"{uuid}.json", content)


def fault_of(directory: Path, uuid: str) -> GpuFault | None:
    """What is wrong with this GPU; a file that is there and cannot be read is a fault, too."""
    path = directory / f"{uuid}.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return GpuFault("gpu_is_unhealthy", sentence=said["sentence"], remedy=said["remedy"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return GpuFault("fault_unreadable", path=path, reason=reason_of(error))


def is_known(directory: Path, uuid: str) -> bool:
    """Somebody who has repaired it takes the file away."""
    return (directory / f"{uuid}.json").exists()
