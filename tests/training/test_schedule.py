"""The learning rate of every step, and the loss scale, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from aura.config import resolve
from aura.optim import loss_scale
from aura.optim.loss_scale import LossScale
from aura.optim.schedule import learning_rate, warmup_steps

WARM = {"steps": 100, "warmup_steps": 10, "lr": 2.0}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (
            WARM | {"schedule": "cosine", "min_lr_ratio": 0.1},
            {
                0: 0.2,
                8: 1.8,
                9: 2.0,
                10: 2.0,
                40: 2 * (0.1 + 0.9 * 0.75),  # a third of the half period: cos 60°
                55: 1.1,
                85: 2 * (0.1 + 0.45 * (1 + math.cos(math.pi * 5 / 6))),
                100: 0.2,
                130: 0.2,
            },
        ),
        (
            WARM | {"schedule": "wsd", "decay_ratio": 0.5, "min_lr_ratio": 0.2},
            {0: 0.2, 9: 2.0, 10: 2.0, 50: 2.0, 51: 2 * (0.2 + 0.8 * 0.98), 75: 1.2, 99: 0.432, 130: 0.4},
        ),
        (WARM | {"schedule": "wsd", "decay_ratio": 0.0, "min_lr_ratio": 0.0}, {50: 2.0, 99: 2.0, 100: 0.0}),
        (
            WARM | {"warmup_steps": 99, "schedule": "cosine", "min_lr_ratio": 0.5},
            {98: 2.0, 99: 2.0, 100: 1.0},
        ),
        (WARM | {"warmup_steps": 300, "schedule": "cosine"}, {0: 2 / 300, 99: 2 / 3}),
    ],
    ids=["cosine", "wsd", "wsd without a decay", "one step after the warm-up", "warm-up for ever"],
)
def test_the_rate_of_a_step(settings: dict[str, Any], rates: dict[int, float]) -> None:
    config = resolve("gpt2-nano", settings)
    assert {step: learning_rate(config, step) for step in rates} == pytest.approx(rates)


def test_the_warm_up_in_steps_goes_before_that_as_a_part() -> None:
    part = {"steps": 200, "warmup_ratio": 0.03}
    assert warmup_steps(resolve("gpt2-nano", part | {"warmup_steps": 0})) == 6
    assert warmup_steps(resolve("gpt2-nano", part | {"warmup_steps": 17})) == 17


@pytest.mark.parametrize("delayed", [False, True])
def test_the_scale_doubles_after_so_many_good_steps_and_halves_at_a_bad_one(
    delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scale, found = LossScale(8.0, enabled=True, delayed=delayed), []
    for left_out in (False, False, False, False, False, True, False, False, False):
        scale.update(left_out)
        found.append(scale.next)
        again = LossScale(1.0, enabled=True, delayed=delayed)
        again.load(scale.state())
        assert vars(again) == vars(scale)
        scale.begin_next()
    assert found == [8, 8, 16, 16, 16, 8, 8, 8, 16]
    without = LossScale(8.0, enabled=False)
    without.load(scale.state())
    assert without.value == without.next == 1.0 and without.state() == {}
