"""micro_batch=auto: how many sequences a rank computes at once, where its GPU has room for more than batch_size.

A micro-batch takes a fixed number of launches, whatever is in it, and a card of many multiprocessors waits for them
(docs/benchmarks.md: gpt2 on an H100 does 354,000 tokens/s with 8 sequences at once and 464,000 with 32). The step, its
sequences and what is learnt stay the same, but for rounding. By the size of the card alone, not by what is free on
it: so a run that is resumed computes as before. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aura.config import TrainConfig
from aura.plan.gpus import Gpu
from aura.plan.memory import is_delayed, memory_of
from aura.plan.units import in_short
from aura.texts.console import text

FULL = 0.8  # of a card's memory: others use it too, a desktop for one
ENOUGH = 32_768  # tokens of a micro-batch: with so many an H100 computes 98 % of the time
CHUNK = 4096  # tokens of the loss at once: of a chunk, too, launches and one addition to the gradient are fixed costs
# Micro-batches that a step has at least where an exchange may be hidden behind a part of them, or unlike ranks share it
SEVERAL = 8


def auto_micro_batch(config: TrainConfig, devices: Sequence[Gpu]) -> dict[str, Any]:
    """Settings in place of those of `config`; none, where nothing is to be changed. devices: of every rank. Raises
    ConfigError."""
    ranks = len(devices)
    if config.micro_batch != "auto" or config.rank_batch_sizes or config.dropout:
        return {}  # with dropout sequences are computed one by one, see run/division.py
    if _is_late(config, ranks):
        return {}  # how many sequences are late, and so what is learnt, follows from the micro-batches
    rooms = [FULL * device.memory if device.is_gpu and device.has_spare else 0.0 for device in devices]
    fullest = _fullest(config, ranks)
    asked = config.batch_sizes(ranks)
    triples = zip(asked, config.shares(ranks), rooms, strict=True)
    sizes = [_largest(fullest, size, share, room, ranks) for size, share, room in triples]
    settings: dict[str, Any] = {}
    if sizes != asked:
        settings["micro_batch"] = ",".join(map(str, sizes))
    larger = replace(fullest, loss_chunk=CHUNK)
    if 0 < config.loss_chunk < CHUNK and all(map(_fits, [larger] * ranks, sizes, rooms, [ranks] * ranks)):
        settings["loss_chunk"] = CHUNK
    return settings


def filled_line(asked: TrainConfig, filled: TrainConfig, ranks: int) -> str:
    """What a person is told of it."""
    sizes, before = (in_short(config.batch_sizes(ranks)) for config in (filled, asked))
    chunks = {"chunk": filled.loss_chunk, "asked_chunk": asked.loss_chunk}
    return text("micro_batch_filled", sizes=sizes, asked=before, **chunks)


def _fits(config: TrainConfig, size: int, room: float, ranks: int) -> bool:
    return memory_of(config, size, on_gpu=True, ranks=ranks).total <= room


def _largest(config: TrainConfig, asked: int, share: int, room: float, ranks: int) -> int:
    """Of as few micro-batches as there may be."""
    if not room:
        return asked
    is_divided = _is_late(config, ranks) or (ranks > 1 and config.balance == "speed")
    for count in range(SEVERAL if is_divided else 1, math.ceil(share / asked)):
        size = math.ceil(share / count)
        if size * config.seq_len <= ENOUGH and _fits(config, size, room, ranks):
            return size
    return asked


def _is_late(config: TrainConfig, ranks: int) -> bool:
    return is_delayed(config, ranks) and config.strategy != "rounds"


def _fullest(config: TrainConfig, ranks: int) -> TrainConfig:
    """Of what strategy=auto may still choose, what needs most memory."""
    if config.strategy != "auto" or ranks == 1:
        return config
    delay = 1 / SEVERAL if config.optimizer == "muon" else 0.0
    return replace(config, strategy="sharded", wire="int8", delay=delay)
