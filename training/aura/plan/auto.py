"""What is decided before torch starts: the GPU of a single process, and what `--preset auto` is on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aura.config import AUTO, OF_A_MICRO_BATCH, TrainConfig, as_words, resolve
from aura.corpus.corpus import META, Corpus, read_corpus
from aura.errors import ConfigError
from aura.plan import gpus
from aura.plan.memory import GIB, largest_micro_batch, memory_of, settings_that_fit
from aura.plan.plan import plan_for
from aura.plan.setting import cluster_of, decide, exchanging
from aura.plan.shapes import parameter_count
from aura.recipe import TOKENS_PER_PARAMETER
from aura.texts.console import text

# The largest model first, and of one model the fastest recipe first.
CANDIDATES = (
    "aura-72h-max",
    "aura-72h-extended",
    "gpt2-medium",
    "gpt2-medium-10gb",
    "gpt2-medium-6gb",
    "gpt2-medium-4gb",
    "gpt2",
)
LAST = "gpt2"  # of these, made to fit: there is no smaller recipe for a GPU
WITHOUT_GPU = "gpt2-nano"
# What a choice may change of its preset: how it is computed, and what the corpus asks for.
CHANGED = (
    "vocab_size",
    "precision",
    "loss_chunk",
    "gradient_checkpointing",
    "batch_size",
    "gradient_accumulation_steps",
    "moment_format",
    "parameter_format",
)
# What is chosen among for so many hours, the largest first, and what such a choice may change of its preset (older ones
# changed its shape and rates, too).
FOR_HOURS = ("qwen3-1b", "qwen3-350m", "qwen3-125m")
FOR_HOURS_ON_CPU = (*FOR_HOURS, "qwen3-nano")
CHANGED_FOR_HOURS = (
    *("layers", "d_model", "heads", "kv_heads", "vocab_size", "precision", "loss_chunk"),
    *(
        "gradient_checkpointing",
        "batch_size",
        "global_batch_tokens",
        "steps",
        "lr",
        "embedding_lr",
        "gain_lr",
    ),
)
# More often than so, text that was seen is worth less than new text: Muennighoff et al. 2023 (arXiv 2305.16264)
PASSES = 4
USABLE = 0.95  # of what is free: torch's allocator leaves gaps


@dataclass(frozen=True)
class Choice:
    """What `auto` means here: a preset, the settings of it that are changed, and a sentence why."""

    preset: str
    reason: str
    settings: dict[str, Any] = field(default_factory=dict)

    def with_these(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Its settings, but where a person says others."""
        settings = {**self.settings, **overrides}
        if OF_A_MICRO_BATCH & self.settings.keys() and OF_A_MICRO_BATCH.isdisjoint(overrides):
            settings.setdefault("micro_batch", "auto")
        if "global_batch_tokens" in overrides and "gradient_accumulation_steps" not in overrides:
            settings.pop("gradient_accumulation_steps", None)  # it follows
        return settings


@dataclass(frozen=True)
class Cards:
    """What there is to train with."""

    gpu: gpus.Gpu  # of every rank
    available: float  # bytes of memory of the smallest of them
    ranks: int = 1
    nodes: int = 1
    link_mbit: float = 1000
    mfu: float | None = None
    has_bf16: bool = True


def resolve_here(
    preset: str,
    overrides: Mapping[str, Any],
    corpus: Path,
    run_dir: Path,
    say: Callable[[str], None],
    hours: float | None = None,
) -> TrainConfig:
    """`resolve`, and for `auto` the choice for this machine; `say` hears its reason. Raises ConfigError, DataError.

    A run that has begun in `run_dir` goes on with what was chosen then, whatever is free now. `corpus`: its directory.
    One of several ranks must not choose: another one may have another GPU. `resolve` refuses it. `hours`: what the
    model is sized for.
    """
    if hours and preset != AUTO:
        raise ConfigError("hours_need_auto", preset=preset)
    if preset != AUTO or not _alone():
        return resolve(preset, overrides)
    before = run_dir / "config.json"
    if before.is_file():
        choice = chosen_before(before)
    else:
        # Whether there is a corpus at all is asked later.
        known = read_corpus(corpus) if (corpus / META).is_file() else None
        found = gpus.of_this_machine(say)
        asked = (overrides, known)
        choice = choose_for(hours, _here(found), *asked) if hours else choose(found, *asked)
    say(choice.reason)
    return resolve(choice.preset, choice.with_these(overrides))


def chosen_before(file: Path) -> Choice:
    """What the run goes on with that has this config.json. Raises ConfigError."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        names = CHANGED_FOR_HOURS if config["preset"] in FOR_HOURS_ON_CPU else CHANGED
        settings = {name: config[name] for name in names} | {"micro_batch": config.get("micro_batch", "auto")}
        return Choice(config["preset"], text("auto_before", preset=config["preset"], file=file), settings)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("auto_damaged", file=file, error=error) from None


def _here(found: list[gpus.Found]) -> Cards:
    """The GPU with most free memory, or the processor."""
    if not found:
        cpu = gpus.cpu()
        return Cards(cpu, USABLE * cpu.memory)
    best = max(found, key=lambda gpu: gpu.free)
    return Cards(gpus.called(best.name, best.total), USABLE * best.free, has_bf16=best.has_bf16)


def choose_for(hours: float, cards: Cards, overrides: Mapping[str, Any], corpus: Corpus | None) -> Choice:
    """The largest of Qwen3's presets that fits the cards and gets TOKENS_PER_PARAMETER in the hours, with the corpus
    read PASSES times at most; where none does, the smallest that fits. Raises ConfigError."""
    if said := sorted({"steps", "tokens", "epochs"}.intersection(overrides)):
        raise ConfigError("hours_say_it", names=", ".join(said))
    gpu, chosen = cards.gpu, None
    for name in FOR_HOURS if gpu.is_gpu else FOR_HOURS_ON_CPU:
        settings: dict[str, Any] = {"vocab_size": corpus.vocab_size} if corpus else {}
        if not (gpu.is_gpu and cards.has_bf16):
            settings["precision"] = "fp16" if gpu.is_gpu else "fp32"
        config = resolve(name, {**settings, **overrides})
        keep = {*overrides, "optimizer", "precision"}
        changes = settings_that_fit(config, cards.available, gpu.is_gpu, keep, cards.ranks)
        if changes is None:
            continue
        config = replace(config, **changes)
        step = sum(config.shares(cards.ranks)) * config.seq_len
        tokens = float(steps_in(hours, config, cards) * step)
        if corpus:
            tokens = min(tokens, PASSES * corpus.tokens["train"])
        settings |= {**changes, "steps": max(1, int(tokens / step))}
        settings = {key: value for key, value in settings.items() if key not in overrides}
        parameters = parameter_count(config)
        chosen = name, settings, {"tokens": tokens, "parameters": parameters, "ratio": tokens / parameters}
        if tokens >= 0.98 * TOKENS_PER_PARAMETER * parameters:
            break
    if not chosen:
        raise ConfigError("hours_need_memory", device=gpu.name)
    name, settings, shown = chosen
    on = {"hours": hours, "count": cards.ranks, "device": gpu.name, "enough": TOKENS_PER_PARAMETER}
    return _choice(name, settings, text("chosen_for_hours", **on, **shown, passes=PASSES))


def steps_in(hours: float, config: TrainConfig, cards: Cards) -> int:
    """With the wire and the delay that `strategy=auto` would take. Raises ConfigError."""
    devices = [cards.gpu] * cards.ranks
    if config.strategy == "auto":
        cluster = cluster_of(config, devices, cards.nodes, cards.link_mbit, cards.mfu)
        if cards.nodes > 1 and cluster:
            config = decide(config, cluster).chosen.applied_to(config)
        else:
            config = exchanging(config, "fp32", 0.0)
    nodes, link, mfu = cards.nodes, cards.link_mbit, cards.mfu
    return plan_for(config, cards.ranks, devices, nodes=nodes, link_mbit=link, mfu=mfu, hours=hours).steps


def take_best_gpu(say: Callable[[str], None], beside_others: bool = False) -> None:
    """A process that is alone on a machine with several GPUs sees only the one with most free memory.

    Ranks of a process group are left alone: each has its own by LOCAL_RANK. beside_others: for who only asks a model;
    it sees the one that others have least of, and none where that is most of it: a training would run out of memory.
    """
    if not _alone():
        return
    # So that a number means to torch what it means to nvidia-smi: by itself CUDA puts the fastest first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        found = gpus.of_this_machine(say)
    except ConfigError:  # torch may know more; if not, it says so
        return
    if beside_others and "CUDA_VISIBLE_DEVICES" not in os.environ and found:
        best = max(found, key=lambda gpu: gpu.free / gpu.total)
        if best.free < best.total / 2:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            say(text("gpu_of_others", gpu=best.name, free=best.free / GIB, total=best.total / GIB))
        elif len(found) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = best.uuid
    elif len(found) > 1:
        best = max(found, key=lambda gpu: gpu.free)
        os.environ["CUDA_VISIBLE_DEVICES"] = best.uuid
        say(text("best_gpu", gpu=best.name, count=len(found)))


def choose(found: list[gpus.Found], overrides: Mapping[str, Any], corpus: Corpus | None = None) -> Choice:
    """The largest preset that fits, with these overrides, the GPU with most free memory. Raises ConfigError."""
    if not found:
        settings = _for_corpus(WITHOUT_GPU, overrides, corpus)
        return _choice(WITHOUT_GPU, settings, text("auto_without_gpu"))
    best = max(found, key=lambda gpu: gpu.free)
    available = USABLE * best.free
    has, too_large = text("auto_has", gpu=best.name, free=best.free / GIB), ""
    if not best.has_bf16:
        has = text("auto_no_bf16", has=has)
    for name in CANDIDATES:
        settings = _for_corpus(name, overrides, corpus)
        config = resolve(name, {**overrides, **settings})
        if not best.has_bf16 and config.parameter_format == "bf16":
            continue
        if not best.has_bf16 and config.precision == "bf16" and "precision" not in overrides:
            settings["precision"] = "fp16"
            config = resolve(name, {**overrides, **settings})
        if name == LAST:
            keep = set(overrides) | (set() if best.has_bf16 else {"parameter_format"})
            settings |= settings_that_fit(config, available, on_gpu=True, keep=keep) or {}
            config = resolve(name, {**overrides, **settings})
        needs = memory_of(config, largest_micro_batch(config), on_gpu=True).total
        if needs <= available:
            return _choice(name, settings, text("auto_needs", needs=needs / GIB, has=has) + too_large)
        too_large = text("auto_too_large", preset=name, needs=needs / GIB)
    return _choice(WITHOUT_GPU, _for_corpus(WITHOUT_GPU, overrides, corpus), f"{has}{too_large}")


def _for_corpus(preset: str, overrides: Mapping[str, Any], corpus: Corpus | None) -> dict[str, Any]:
    """A vocabulary as large as the corpus' own, where the preset's is smaller."""
    if corpus is None or "vocab_size" in overrides or corpus.vocab_size <= resolve(preset).vocab_size:
        return {}
    return {"vocab_size": corpus.vocab_size}


def _choice(preset: str, settings: dict[str, Any], why: str) -> Choice:
    what = text("auto_with", preset=preset, settings=as_words(settings)) if settings else preset
    return Choice(preset, text("auto", what=what, why=why), settings)


def _alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"
