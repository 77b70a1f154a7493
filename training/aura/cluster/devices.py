"""What every rank computes with, known to all of them: PCs may have unlike GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict

from aura.cluster.ranks import Ranks
from aura.plan.gpus import Gpu


def of_all_ranks(ranks: Ranks, own: Gpu) -> list[Gpu]:
    """By rank. Every rank has to ask at the same time. Raises CollectiveFailed."""
    description = json.dumps(asdict(own)).encode()
    return [Gpu(**json.loads(ranks.broadcast_bytes(description, rank))) for rank in range(ranks.world_size)]
