"""What stands in the way of a look after the graphics cards."""

from __future__ import annotations

from typing import Any

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    interval = settings["interval"]
    if 1 <= interval <= 30:
        return []
    return [
        f"gpu_watch_interval is {interval}: it has to be from 1 to 30, so that what lasts half a minute is seen."
    ]
