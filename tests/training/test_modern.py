"""The benchmark of today's recipe compares what it says: the same work, one ingredient less, the best of its rates."""

from __future__ import annotations

import math

import pytest
import torch
from aura.plan.flops import flops_per_token, update_flops
from aura.recipe import recipe
from measuring import part_until
from modern import STEPS, Job, tune, with_differences, work
from modern_arms import ARMS, MODERN, TODAY, model_for
from torch.utils.flop_counter import FlopCounterMode

BATCH = (8, 64)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_has_the_same_work_and_about_as_many_parameters(arm: str) -> None:
    """By what torch counts of a forward pass, which attention is not part of on a CPU."""
    config, today = Job(arm, 1e-2, 0).config(), Job(TODAY, 1e-2, 0).config()
    assert config.steps * flops_per_token(config) == pytest.approx(STEPS * flops_per_token(today), rel=2e-3)
    counts = []
    for one in (arm, TODAY):
        made = Job(one, 1e-2, 0).config()
        model = model_for(ARMS[one], made)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.loss_sum(torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64))
        counts.append((made.steps * counter.get_total_flops(), model.parameter_count()))
    (flops, parameters), (of_today, parameters_of_today) = counts
    assert flops == pytest.approx(of_today, rel=0.02)
    assert parameters == pytest.approx(parameters_of_today, rel=0.12)


def test_an_arm_differs_from_the_preset_in_what_it_says() -> None:
    modern = Job(MODERN, 1e-2, 0).config()
    wanted = recipe(modern.d_model, 1e9)
    assert modern.embedding_lr / modern.lr == pytest.approx(wanted.embedding_lr / wanted.lr, rel=0.02)
    for arm, settings in {
        "AdamW in place of Muon": {"optimizer"},
        "cosine to a tenth in place of constant and linear": {"schedule", "min_lr_ratio"},
        "one rate for all": {"embedding_lr"},
        "embeddings decay": {"decay_embeddings"},
        "projections begin as the others": {"zero_projections"},
        "keys and values of each head": {"kv_heads"},
        "no norms of queries and keys": set(),
        "GELU in place of SwiGLU": set(),
    }.items():
        other = Job(arm, 1e-2, 0).config()
        differ = {name for name in vars(modern) if getattr(other, name) != getattr(modern, name)}
        assert differ - {"steps", "warmup_ratio", "gain_lr"} == settings, arm
    names = {name for name, _ in model_for(ARMS["no norms of queries and keys"], modern).named_parameters()}
    assert not any("q_norm" in name or "k_norm" in name for name in names)
    names = {name for name, _ in model_for(ARMS["GELU in place of SwiGLU"], modern).named_parameters()}
    assert not any("gate_proj" in name for name in names)


def test_a_rate_is_sought_until_it_lies_between_two_others() -> None:
    def bits(arm: str, rates: list[float], seeds: range) -> list[list[float]]:
        asked.extend(rates)
        return [[abs(rate - 0.06)] for rate in rates]

    asked: list[float] = []
    tried = tune(MODERN, bits)
    assert len(asked) == len(tried) >= 5  # none twice
    assert min(tried) < min(tried, key=tried.__getitem__) < max(tried)


def test_the_numbers() -> None:
    of_parts = {0.1: 3.0, 0.4: 2.0, 1.0: 1.0}
    assert part_until(2.5, of_parts) == pytest.approx(0.2) and part_until(2.0, of_parts) == 0.4
    assert math.isnan(part_until(0.5, of_parts)) and math.isnan(part_until(3.1, of_parts))
    rows = [{"arm": arm, "of_seeds": losses} for arm, losses in ((TODAY, [3.0, 4.0]), (MODERN, [1.0, 2.5]))]
    row = with_differences(rows)[0]
    assert row["difference"] == 1.75 and row["lower_95"] < 1.75 < row["upper_95"]
    job = Job(MODERN, 1e-2, 0)
    assert work(job) == 512 * flops_per_token(job.config()) + update_flops(job.config())
