"""What stands in the way of changes that undo themselves."""

from __future__ import annotations

import json
from typing import Any

Seen = dict[str, Any]
MARKER = "/var/lib/aura-safe-change/current/marker.json"


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    """What an interrupted run has changed looks as it shall be, until the node takes it back."""
    text = node["texts"][MARKER]
    if not text:
        return []
    marker = json.loads(text)
    return [
        f"it has not been confirmed that it can be reached with its new settings ({marker['of']}), and it takes the "
        f"old ones back by itself within {2 * marker['seconds'] + 30:.0f} s. Run this again then; if it says the same, "
        "have the node do so, there: sudo /usr/local/lib/aura/safe-change undo."
    ]
