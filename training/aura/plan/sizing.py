"""How large a model, how long and in which steps: what `--preset auto` means where a person names hours.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aura.config import TrainConfig, resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.plan.candidates import cluster_of, decide, exchanging
from aura.plan.gpus import Gpu
from aura.plan.memory import settings_that_fit
from aura.plan.plan import plan_for
from aura.plan.shapes import parameter_count
from aura.recipe import TOKENS_PER_PARAMETER, rate, recipe
from aura.texts.console import text

SIZED = "qwen3-125m"  # what the sizes are made of
# Widths and their layers: those of our presets, and between and beside them in Qwen3's own proportions. Heads have 64.
SIZES = ((256, 6), (512, 10), (768, 14), (1024, 18), (1024, 26), (1280, 28), (1536, 28), (2048, 28))
# More often than so, text that was seen is worth less than new text: Muennighoff et al. 2023 (arXiv 2305.16264)
PASSES = 4
SHAPE = ("layers", "d_model", "heads", "kv_heads")
# What a choice may say
CHANGED = (
    *(*SHAPE, "vocab_size", "precision", "loss_chunk", "gradient_checkpointing", "batch_size"),
    *("global_batch_tokens", "steps", "lr", "embedding_lr", "gain_lr"),
)


@dataclass(frozen=True)
class Cards:
    """What there is to train with, and for how long."""

    devices: Sequence[Gpu]  # of every rank
    available: float  # bytes of memory of the smallest of them
    hours: float
    nodes: int = 1
    link_mbit: float = 1000
    mfu: float | None = None
    has_bf16: bool = True


@dataclass(frozen=True)
class Size:
    settings: dict[str, Any]
    parameters: int
    tokens: float  # of the run

    @property
    def is_fed(self) -> bool:
        """With enough tokens for its parameters, or nearly."""
        return self.tokens >= 0.98 * TOKENS_PER_PARAMETER * self.parameters


def size_for(
    cards: Cards, overrides: Mapping[str, Any], corpus: Corpus | None = None
) -> tuple[dict[str, Any], str]:
    """Settings of SIZED, and why: the largest model that fits the cards and gets TOKENS_PER_PARAMETER in the hours,
    reading the corpus at most PASSES times; the smallest, where none does. Raises ConfigError."""
    if said := sorted(
        {*SHAPE, "steps", "tokens", "epochs", "gradient_accumulation_steps"}.intersection(overrides)
    ):
        raise ConfigError("hours_say_it", names=", ".join(said))
    best: Size | None = None
    for d_model, layers in SIZES:
        size = _sized(_shape(d_model, layers), cards, overrides, corpus)
        if size is None or (best and not size.is_fed):
            break
        best = size
    if best is None:
        raise ConfigError("hours_need_memory", device=cards.devices[0].name)
    values = {"hours": cards.hours, "count": len(cards.devices), "device": cards.devices[0].name}
    why = {**values, "tokens": best.tokens, "parameters": best.parameters, "enough": TOKENS_PER_PARAMETER}
    reason = text("sized", **why, ratio=best.tokens / best.parameters)
    if corpus and best.tokens > 0.99 * PASSES * corpus.tokens["train"]:
        reason += text("sized_by_text", passes=PASSES)
    return best.settings, reason


def _shape(d_model: int, layers: int) -> dict[str, Any]:
    heads = d_model // 64
    return {"layers": layers, "d_model": d_model, "heads": heads, "kv_heads": min(4, heads // 2)}


def _sized(
    shape: dict[str, Any], cards: Cards, overrides: Mapping[str, Any], corpus: Corpus | None
) -> Size | None:
    """None where it does not fit."""
    first, ranks = cards.devices[0], len(cards.devices)
    settings = {**shape, "precision": ("bf16" if cards.has_bf16 else "fp16") if first.is_gpu else "fp32"}
    if corpus:
        settings["vocab_size"] = corpus.vocab_size
    size = resolve(SIZED, {**settings, **overrides})
    tokens = float(TOKENS_PER_PARAMETER * parameter_count(size))
    for _ in range(2):  # how long a token takes depends a little on the batch, and that on their number
        settings |= asdict(recipe(size.d_model, tokens))
        if size.optimizer != "muon":  # which the recipe is for
            settings["lr"] = rate(size.optimizer, size.d_model)
        sequences = max(ranks, round(settings["global_batch_tokens"] / size.seq_len))
        settings["global_batch_tokens"] = sequences * size.seq_len
        config = resolve(SIZED, {**settings, **overrides})
        keep = {*overrides, "optimizer", "precision"}
        changes = settings_that_fit(config, cards.available, first.is_gpu, keep, ranks)
        if changes is None:
            return None
        settings |= changes
        step = config.global_batch_tokens
        tokens = steps_in_time(replace(config, **changes), cards) * step
        if corpus:
            tokens = min(tokens, PASSES * corpus.tokens["train"])
    settings["steps"] = max(1, math.floor(tokens / step))
    settings = {name: value for name, value in settings.items() if name not in overrides}
    return Size(settings, parameter_count(config), settings["steps"] * step)


def steps_in_time(config: TrainConfig, cards: Cards) -> int:
    """With the wire and the delay that `strategy=auto` would take."""
    is_open = config.strategy != "rounds" and not config.delay and config.wire == "fp32"
    if cards.nodes > 1 and is_open:
        cluster = cluster_of(config, cards.devices, cards.nodes, cards.link_mbit, cards.mfu)
        if cluster:
            config = decide(config, cluster).chosen.applied_to(config)
    elif config.strategy == "auto":
        config = exchanging(config, "fp32", 0.0)
    return plan_for(
        config,
        len(cards.devices),
        cards.devices,
        nodes=cards.nodes,
        link_mbit=cards.link_mbit,
        hours=cards.hours,
        mfu=cards.mfu,
    ).steps
