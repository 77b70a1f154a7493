"""What is in an image of Docker's: the same on every node, though its ID depends on how each Docker keeps it."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def image_content(inspected: str) -> str:
    """A name for what is in an image and what it starts, from `docker image inspect`; "" without an image.

    Docker's older store calls an image by its settings, containerd's (the default of Docker 29) by its manifest.
    """
    found: list[dict[str, Any]] = json.loads(inspected or "[]")
    if not found:
        return ""
    settings = found[0]["Config"]
    parts = [found[0]["RootFS"]["Layers"], settings.get("Env"), settings.get("Entrypoint")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"image_content": image_content}
