"""What every rank computes with, as the plan of a run with several ranks counts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aura.backend import agreed_backend
from aura.cluster.dist_env import link_mbit
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.plan import gpus
from aura.plan.plan import plan_for
from aura.run import attempt
from aura.run.pace import Pace
from trainers import both, complete, start


def test_a_launch_plans_with_the_device_of_every_rank_and_the_link_of_the_inventory(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gpus.Gpu("Unlike", 2**34, {"fp32": 1e9}, "made up: it cannot be reached — tenía", is_gpu=True)

    def unlike() -> None:
        attempt.gpu_of = lambda device, own: slow  # type: ignore[assignment]

    def have_a_gpu() -> None:
        attempt.choose_device = lambda place, backend: (torch.device("cpu"), backend)

    monkeypatch.setenv("AURA_LINK_MBIT", "2500")
    faults = {0: have_a_gpu, 1: both(have_a_gpu, unlike)}
    ranks = complete(start(tmp_path, corpus, 2, "--steps 1", faults))
    for said in ("1 x CPU, 1 x Unlike", "made up: it cannot be reached — tenía", "2500 Mbit/s"):
        assert said in ranks[0].text
    # And ranks with a card talk gloo between nodes.
    for trainer in ranks:
        assert "Backend=gloo" in trainer.text and "cannot use NCCL" not in trainer.text


def test_mfu_is_a_part_of_all_peaks_together() -> None:
    config = resolve("gpt2")
    card, faster = gpus.find("RTX 3060"), gpus.find("RTX 4090")
    for devices, shown in (([card, faster], "25.0%"), ([card, replace(faster, peak={})], "?")):
        plan = plan_for(config, 2, devices)
        pace = Pace(plan, config, torch.device("cuda", 0))
        tokens_per_second = 0.25 * (25.5e12 + 165.2e12) / plan.flops_per_token
        pace.add(2.0, 2 * tokens_per_second)
        assert f"MFU: {shown} |" in pace.line(1)


def test_the_time_that_is_left_follows_from_the_last_steps() -> None:
    config = resolve("gpt2", {"steps": 1000})
    pace = Pace(plan_for(config, 1, [gpus.find("RTX 3060")]), config, torch.device("cpu"))
    for seconds in (2.0, 1.0):
        for _ in range(100):
            pace.add(seconds, 1.0)
    assert pace.left(200) == 800.0


def test_the_link_of_the_inventory_is_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("fast", "0", "nan", "inf"):
        monkeypatch.setenv("AURA_LINK_MBIT", wrong)
        refusal = f"AURA_LINK_MBIT='{wrong}' must be the speed of the link in Mbit/s"
        with pytest.raises(ConfigError, match=refusal):
            link_mbit()
    monkeypatch.delenv("AURA_LINK_MBIT")
    assert link_mbit() == 1000


@pytest.mark.parametrize(
    ("wishes", "nodes", "agreed"),
    [
        (["auto", "auto"], ["a", "a"], "nccl"),
        (["auto", "auto"], ["a", "b"], "gloo"),
        (["nccl", "nccl"], ["a", "b"], "nccl"),
        (["auto", "gloo"], ["a", "a"], "gloo"),
        (["nccl", "gloo"], ["a", "b"], "gloo"),
    ],
)
def test_between_nodes_auto_means_gloo(wishes: list[str], nodes: list[str], agreed: str) -> None:
    assert agreed_backend(wishes, nodes) == agreed
