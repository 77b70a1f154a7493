"""The learning rate of every step, and the loss scale, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from aura.config import resolve
from aura.optim.loss_scale import LossScale
from aura.optim.schedule import learning_rate

WARM = {"steps": 100, "warmup_steps": 10, "lr": 2.0}
COSINE, WSD = WARM | {"schedule": "cosine"}, WARM | {"schedule": "wsd"}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (
            COSINE | {"min_lr_ratio": 0.1},
            # 40: a third of the half period, cos 60°
            {0: 0.2, 8: 1.8, 9: 2.0, 10: 2.0, 40: 2 * (0.1 + 0.9 * 0.75), 55: 1.1}
            | {85: 2 * (0.1 + 0.45 * (1 + math.cos(math.pi * 5 / 6))), 100: 0.2, 130: 0.2},
        ),
        (
            WSD | {"decay_ratio": 0.5, "min_lr_ratio": 0.2},
            {0: 0.2, 9: 2.0, 10: 2.0, 50: 2.0, 51: 2 * (0.2 + 0.8 * 0.98), 75: 1.2, 99: 0.432, 130: 0.4},
        ),
        (WSD | {"decay_ratio": 0.0, "min_lr_ratio": 0.0}, {50: 2.0, 99: 2.0, 100: 0.0}),
        (COSINE | {"warmup_steps": 99, "min_lr_ratio": 0.5}, {98: 2.0, 99: 2.0, 100: 1.0}),
        (COSINE | {"warmup_steps": 300}, {0: 2 / 300, 99: 2 / 3}),
    ],
    ids=["cosine", "wsd", "wsd without a decay", "one step after the warm-up", "warm-up for ever"],
)
def test_the_rate_of_a_step(settings: dict[str, Any], rates: dict[int, float]) -> None:
    config = resolve("gpt2-nano", settings)
    assert {step: learning_rate(config, step) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("delayed", [False, True])
def test_the_loss_scale_is_that_of_torchs_grad_scaler(delayed: bool) -> None:
    scale = LossScale(512.0, enabled=True, delayed=delayed)
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(2600):
        before, left_out = scale.value, step in (3, 2500)
        parameter.grad = torch.full((1,), float("inf") if left_out else 1.0)
        theirs.scale(torch.ones(()))  # type: ignore[no-untyped-call]
        theirs.step(optimizer)
        theirs.update()
        scale.update(left_out)
        assert scale.next == theirs.get_scale()
        assert scale.value == (before if delayed else scale.next)
        again = LossScale(1.0, enabled=True, delayed=delayed)  # as at a resume
        again.load(scale.state())
        assert vars(again) == vars(scale)
        scale.begin_next()
    for name in ("scale", "_growth_tracker"):
        assert scale.state()[name] == theirs.state_dict()[name]
    without = LossScale(8.0, enabled=False)
    without.update(left_out=True)
    without.load(scale.state())
    assert without.value == without.next == 1.0 and without.state() == {}
