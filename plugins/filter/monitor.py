"""Which rank trains on which card of a node, for the table of playbooks/monitor.yml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


def with_ranks(load: Json, ranks: Sequence[Json], uuids: Mapping[str, str]) -> list[tuple[Json, Json | None]]:
    """Every card with its rank, and the processor where a rank trains on it or nothing else is there.

    uuids: of the cards, by number; one that the driver has lost has none. The number of a rank says nothing of its
    card's: a card that drives a display does not train.
    """
    processor = {
        "name": "CPU", "load_percent": load.get("cpu_percent"),
        "used_bytes": load.get("ram_used_bytes"), "total_bytes": load.get("ram_total_bytes"),
    }  # fmt: skip
    if not any("card" in rank for rank in ranks):
        uuids = {}  # the node's rank-status is older
    known = {rank.get("card"): rank for rank in ranks if rank.get("card") in uuids.values()}
    unsure = [rank for rank in ranks if rank.get("card") != "" and rank.get("card") not in known]
    lines: list[tuple[Json, Json | None]] = []
    for card in load.get("gpus") or []:
        uuid = uuids.get(str(card["index"]))
        lines.append((card, known.get(uuid) if uuid else unsure.pop(0) if unsure else None))
    others = unsure + [rank for rank in ranks if rank.get("card") == ""]
    return lines + [(processor, rank) for rank in others or ([] if lines else [None])]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"with_ranks": with_ranks}
