"""What is claimed of a card's numbers, on one: docs/benchmarks.md has what an H100 said."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from aura.cluster.dist_env import DRIVERS
from aura.corpus.corpus import Corpus
from aura.optim.gradient_sum import sum_at_random
from aura.strategy.codec import QUANTISED, decode, encode
from trainers import complete, curve, start, stop_at, stopped_and_resumed

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(
        not DRIVERS[0].exists(), reason="an NVIDIA card is needed, and its driver finds none here"
    ),
]
MUON = "--optimizer muon --wire int4 --delay 0.5 --gradient-accumulation-steps 2"


def without_the_card() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def codes_are_decoded_alike() -> None:
    numbers = torch.Generator().manual_seed(1)
    for allowed in ("highest", "high"):  # TF32
        torch.set_float32_matmul_precision(allowed)
        for wire in QUANTISED:
            values = torch.randn(1_000_077, generator=numbers)
            values[::1000] *= 100
            sent = encode(values, wire)
            here, there = decode(sent, wire, len(values)), decode(sent.cuda(), wire, len(values))
            assert torch.equal(here, there.cpu())
            assert torch.equal(values + here, (values.cuda() + there).cpu())
            values[5] = torch.nan
            assert not decode(encode(values.cuda(), wire), wire, len(values)).isfinite().all()
    one = torch.tensor([1.0, torch.inf, -torch.inf], dtype=torch.bfloat16, device="cuda")
    other = torch.tensor([torch.nan, -torch.inf, 1.0], dtype=torch.bfloat16, device="cuda")
    drawn = torch.Generator("cuda").manual_seed(1)
    assert sum_at_random(one, other, drawn).isfinite().tolist() == [False, False, False]


def test_a_card_decodes_to_the_bits_of_a_processor() -> None:
    process = multiprocessing.get_context("spawn").Process(target=codes_are_decoded_alike)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize("settings", ["", "--strategy rounds --local-steps 5 --optimizer muon", MUON])
def test_a_card_and_a_processor_end_with_the_same_parameters(
    settings: str, corpus: Corpus, tmp_path: Path
) -> None:
    card, processor = complete(start(tmp_path, corpus, 2, settings, {1: without_the_card}))
    assert "Device cuda:0" in card.text and "Device cpu" in processor.text
    last = "checkpoint-step-20"
    assert card.files(last)[0] == processor.files(last)[0]


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_with_deterministic_kernels_a_resumed_run_has_the_bits_of_another(
    compiled: str, corpus: Corpus, tmp_path: Path
) -> None:
    settings = f"--deterministic true --compile {compiled} --precision bf16 --gradient-accumulation-steps 2"
    stopped_and_resumed(tmp_path, corpus, 1, settings, 9)


def test_a_card_goes_on_as_the_processor_would(corpus: Corpus, tmp_path: Path) -> None:
    """Tolerance: 1e-3 nats at each step."""
    (straight,) = complete(start(tmp_path / "straight", corpus, 1, "", {0: without_the_card}))
    stop_at(10, tmp_path / "card", corpus, 1, before=without_the_card)
    (resumed,) = complete(start(tmp_path / "card", corpus, 1))
    assert "Device cuda:0" in resumed.text
    assert curve(resumed) == pytest.approx(curve(straight), abs=1e-3)
