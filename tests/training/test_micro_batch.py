"""micro_batch=auto: as many sequences at once as a card has room for, and the same step."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.errors import EXIT_TEMPORARY, ConfigError
from aura.model.gpt import GPT
from aura.plan import gpus
from aura.plan.auto import Choice
from aura.plan.memory import GIB, largest_micro_batch, memory_of, settings_that_fit
from aura.plan.micro_batch import CHUNK, FULL, SEVERAL, auto_micro_batch
from aura.run import attempt, out_of_memory
from trainers import complete, curve, start

BIG, SMALL = gpus.find("RTX 4090"), gpus.find("RTX 3060")
# TINY says a batch_size, which would be taken as it is said.
AUTO = "--micro-batch auto --gradient-accumulation-steps 6 --loss-chunk 12 "


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "auto", "optimizer": "muon"},
        {"wire": "int4"},
        {"balance": "speed", "global_batch_tokens": 491520},
    ],
)
@pytest.mark.parametrize("preset", ["gpt2", "gpt2-medium", "qwen3-350m"])
def test_a_card_is_filled_and_not_more(preset: str, settings: dict[str, Any]) -> None:
    config = resolve(preset, settings)
    for devices in ([BIG], [SMALL] * 5, [BIG, SMALL]):
        ranks = len(devices)
        filled = replace(config, **auto_micro_batch(config, devices))
        assert filled.shares(ranks) == config.shares(ranks)
        sizes = zip(devices, config.batch_sizes(ranks), filled.batch_sizes(ranks), strict=True)
        for device, before, size in sizes:
            most = max(FULL * device.memory, _needs(config, before, ranks))
            assert size >= before and _needs(filled, size, ranks) <= most
        divided = config.balance == "speed" or (config.strategy == "auto" and config.optimizer == "muon")
        if divided and ranks > 1 and filled.batch_sizes(ranks) != config.batch_sizes(ranks):
            assert min(filled.shares(ranks)) >= SEVERAL * max(filled.batch_sizes(ranks))


def _needs(config: Any, size: int, ranks: int) -> int:
    return memory_of(config, size, on_gpu=True, ranks=ranks).total


def test_a_large_card_computes_a_step_of_gpt2_in_three_parts() -> None:
    assert auto_micro_batch(resolve("gpt2"), [BIG]) == {"micro_batch": "32", "loss_chunk": CHUNK}
    assert auto_micro_batch(resolve("gpt2"), [BIG, SMALL])["micro_batch"].startswith("32,")
    filled = replace(resolve("gpt2"), micro_batch="32")
    assert (filled.batch_sizes(1), largest_micro_batch(filled)) == ([32], 32)
    # Not one more than a share, and those of a smaller process group keep theirs.
    assert replace(resolve("gpt2"), micro_batch="500").batch_sizes(1) == [96]
    assert replace(resolve("gpt2"), micro_batch="32,8,16").among(3, [0, 2]).micro_batch == "32,16"


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 8},
        {"loss_chunk": 1024},
        {"micro_batch": "batch_size"},
        {"rank_batch_sizes": "8"},
        {"dropout": 0.1},
        {"optimizer": "muon", "delay": 0.5},
    ],
)
def test_what_a_person_says_is_taken(settings: dict[str, Any]) -> None:
    ranks = 1 if "rank_batch_sizes" in settings else 2
    assert auto_micro_batch(resolve("gpt2", settings), [BIG] * ranks) == {}
    assert auto_micro_batch(resolve("gpt2"), [gpus.cpu()]) == {}
    assert auto_micro_batch(resolve("gpt2"), [replace(BIG, has_spare=False)]) == {}


def test_what_a_choice_says_is_no_persons_word() -> None:
    choice = Choice("gpt2", "", {"batch_size": 4})
    assert resolve("gpt2", choice.with_these({})).micro_batch == "auto"
    assert resolve("gpt2", choice.with_these({"batch_size": 2})).micro_batch == "batch_size"


@pytest.mark.parametrize(
    ("value", "says"),
    [("atuo", "must be whole numbers above 0 .* also auto or batch_size"), ("8,4", "2 numbers")],
)
def test_a_wrong_one_is_refused(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve("gpt2", {"micro_batch": value}).batch_sizes(5)


def test_what_does_not_fit_is_first_computed_in_smaller_parts() -> None:
    config = resolve("qwen3-125m", {"micro_batch": "64"})
    assert settings_that_fit(config, 12 * GIB, on_gpu=True) == {"micro_batch": "batch_size"}
    assert largest_micro_batch(resolve("gpt2", {"rank_batch_sizes": "2,2", "micro_batch": "4"})) == 4


def has_a_card() -> None:
    """As the plan sees it; computed is on the processor."""

    def gpu_of(device: torch.device, own: Path) -> gpus.Gpu:
        return replace(BIG, has_spare=not (own / "no_spare").exists())

    attempt.gpu_of = out_of_memory.gpu_of = gpu_of


def has_less_than_it_says() -> None:
    has_a_card()
    loss_sum = GPT.loss_sum

    def bounded(self: GPT, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        if len(tokens) > 2 and self.training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_sum(self, tokens, *others)

    GPT.loss_sum = bounded  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_filled_step_learns_the_same(ranks: int, corpus: Corpus, tmp_path: Path) -> None:
    """Tolerance: 1e-4 nats at each of 20 steps: the same sums in another order."""
    (plain, *_) = complete(start(tmp_path / "plain", corpus, ranks, AUTO))
    cards = dict.fromkeys(range(ranks), has_a_card)
    (filled, *_) = complete(start(tmp_path / "filled", corpus, ranks, AUTO, cards))
    assert re.search("micro_batch=auto.* micro-batches of 12 sequences and 4096 tokens", filled.text)
    assert "micro_batch=auto" not in plain.text
    assert curve(filled) == pytest.approx(curve(plain), abs=1e-4) and len(curve(plain)) == 20


def test_where_a_card_has_less_room_the_next_start_takes_less(corpus: Corpus, tmp_path: Path) -> None:
    (first,) = start(tmp_path, corpus, 1, AUTO, {0: has_less_than_it_says})
    assert first.end() == EXIT_TEMPORARY and "Started again" in first.text
    (again,) = complete(start(tmp_path, corpus, 1, AUTO, {0: has_less_than_it_says}))
    assert "micro_batch=auto" not in again.text and again.done["step"] == 20
