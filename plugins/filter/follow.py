"""Whether what `-e wait=true` follows, a run or somebody else's script, goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ENDED = ("inactive", "failed")


def still_active(nodes: Iterable[Mapping[str, Any]]) -> bool:
    """nodes: what roles/trainer/tasks/status.yml has set for each.

    A node that does not answer is not waited for: whoever wants to know looks again when it is back. Nor is a rank that
    came back when the others had done all.
    """
    answering = [node for node in nodes if node["trainer_answers"]]
    ranks = [rank for node in answering for rank in node["trainer_status"]]
    late = any(rank.get("state") == "done" for rank in ranks)
    return any(node["script_status"].get("active") for node in answering) or any(
        rank["unit"]["ActiveState"] not in ENDED and not (late and rank.get("state") == "joining")
        for rank in ranks
    )


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"still_active": still_active}
