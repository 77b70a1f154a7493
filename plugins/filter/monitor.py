"""Which rank trains on which card of a node, for the table of playbooks/monitor.yml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


def with_ranks(load: Json, ranks: Sequence[Json]) -> list[tuple[Json, Json | None]]:
    """Every card with its rank, and the processor where a rank trains on it or nothing else is there.

    The number of a rank says nothing of its card's, which may drive a display and not train: UUIDs do. A card that the
    driver has lost has none, nor have the nodes of an older release.
    """
    processor = {
        "name": "CPU", "load_percent": load.get("cpu_percent"),
        "used_bytes": load.get("ram_used_bytes"), "total_bytes": load.get("ram_total_bytes"),
    }  # fmt: skip
    cards = load.get("gpus") or []
    said = any("card" in rank for rank in ranks)
    uuids = [card.get("uuid", "") if said else "" for card in cards]
    known = {rank["card"]: rank for rank in ranks if rank.get("card") and rank["card"] in uuids}
    unsure = [rank for rank in ranks if rank.get("card") != "" and rank.get("card") not in known]
    lines: list[tuple[Json, Json | None]] = []
    for card, uuid in zip(cards, uuids, strict=True):
        lines.append((card, known.get(uuid) if uuid else unsure.pop(0) if unsure else None))
    others = unsure + [rank for rank in ranks if rank.get("card") == ""]
    return lines + [(processor, rank) for rank in others or ([] if lines else [None])]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"with_ranks": with_ranks}
