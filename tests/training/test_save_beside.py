"""Training goes on while the optimizer's state of all ranks is put together for a checkpoint, and written."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.run import trainer as train
from aura.strategy import sharded
from trainers import Fault, complete, infinite_gradient, send_self, start

Collect = Callable[[], dict[str, torch.Tensor]]
STEPS = 18
SETTINGS = f"--keep-checkpoints 9 --save-every 4 --steps {STEPS}"


def before_each_collection(act: Callable[[], None]) -> Fault:
    def put_in() -> None:
        original = sharded.whole_state

        def whole_state(*arguments: Any) -> Collect:
            collect = original(*arguments)

            def late() -> dict[str, torch.Tensor]:
                act()
                return collect()

            return late

        sharded.whole_state = whole_state  # type: ignore[assignment]

    return put_in


def two_steps_later() -> Fault:
    """What is collected waits until training has gone two steps on, but for the last save."""
    begun: list[int] = []
    another = threading.Condition()
    original = train.learning_rate

    def learning_rate(config: TrainConfig, number: int) -> float:
        with another:
            begun.append(number)
            another.notify_all()
        return original(config, number)

    def wait() -> None:
        now = len(begun)
        with another:
            assert now == STEPS or another.wait_for(lambda: len(begun) >= now + 2, 20), "training waits"

    def put_in() -> None:
        train.learning_rate = learning_rate  # type: ignore[assignment]
        before_each_collection(wait)()

    return put_in


def test_a_checkpoint_holds_its_own_step_although_training_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    usual = complete(start(tmp_path / "usual", corpus, 2, SETTINGS))
    faults = dict.fromkeys(range(2), two_steps_later())
    for trainer in complete(start(tmp_path / "late", corpus, 2, SETTINGS, faults)):
        assert trainer.checkpoints() == usual[0].checkpoints(), trainer.text
        assert all(trainer.files(name) == usual[0].files(name) for name in trainer.checkpoints())


def test_a_rank_that_dies_while_it_collects_ends_the_attempt_and_nobody_waits_for_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    fault = before_each_collection(send_self(signal.SIGKILL))
    first, second = start(tmp_path, corpus, 2, SETTINGS, {1: fault})
    assert second.end() == -signal.SIGKILL
    assert first.end() == 75, first.text
    assert first.checkpoints() == []
    complete(start(tmp_path, corpus, 2, SETTINGS))


def test_who_freezes_while_it_collects_is_named_and_nobody_waits_for_its_part(
    corpus: Corpus, tmp_path: Path
) -> None:
    fault = before_each_collection(send_self(signal.SIGSTOP))
    first, second = start(tmp_path, corpus, 2, f"{SETTINGS} --collective-timeout 600", {1: fault})
    try:
        assert first.end() == 75, first.text
    finally:
        second.process.kill()
    assert "rank 1 on node1" in first.status["message"]
    assert first.checkpoints() == []


def test_a_run_that_ends_for_good_has_saved_what_it_was_saving(corpus: Corpus, tmp_path: Path) -> None:
    """A gradient is no number two steps after a save, while that is still collected."""

    def spoil() -> None:
        infinite_gradient(6)()
        before_each_collection(lambda: time.sleep(2))()

    ranks = start(tmp_path, corpus, 2, SETTINGS, dict.fromkeys(range(2), spoil))
    for trainer in ranks:
        assert trainer.end() == 65, trainer.text
        assert "The gradient is not finite at step 6" in trainer.text
        assert trainer.checkpoints() == ["checkpoint-step-4"]
