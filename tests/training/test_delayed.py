"""The strategy `sharded` with a delay: the exchange of a step goes on while the next one computes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from aura.corpus.corpus import Corpus
from aura.strategy.delayed import Delayed
from aura.strategy.sharded import Sharded
from aura.strategy.state import in_memory
from playing import Setting
from sharded_ranks import Rank, Task, batches_of, check_equal, complete, losses, parameters
from test_learning import plain
from trainers import at_step, both, curve, infinite_gradient, send_self, start, stop_at, stopped_and_resumed
from trainers import complete as completed

MUON = {"optimizer": "muon", "clip": 0.2}
RUN = "--optimizer muon --lr 0.02 --gradient-accumulation-steps 4 --batch-size 1 --steps 8 --save-every 3 "


def reference(task: Task, predicted: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What the ranks of the task have to arrive at, in one process and by the definition."""
    ranks = [batches_of(task, rank) for rank in range(task.world_size)]
    batches = [
        torch.stack([torch.cat(parts) for parts in zip(*of_step, strict=True)], dim=1)
        for of_step in zip(*ranks, strict=True)
    ]
    return plain(task.config, Setting(late=task.config.delay, predicted=predicted), batches)


@pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "plain"])
@pytest.mark.parametrize(
    ("delay", "nodes", "wire"),
    [(0.5, (), "fp32"), (1.0, (), "fp32"), (0.5, ("a", "b", "a"), "fp32"), (0.5, (), "int8")],
)
def test_late_micro_batches_see_the_weights_of_the_definition(
    delay: float, nodes: tuple[str, ...], wire: str, predicted: bool, tmp_path: Path
) -> None:
    settings = MUON | {"delay": delay, "predicted_weights": predicted}
    task = Task(tmp_path, 3, settings, steps=5, micro_batches=2, sequences=12, nodes=nodes, wire=wire)
    found = complete(task)
    check_equal(found, task.steps)
    weights, wanted = reference(task, predicted)
    got = losses(found[0])
    assert got == pytest.approx(wanted, abs=2e-4 if wire == "fp32" else 5e-3)
    for name, weight in parameters(task).items() if wire == "fp32" else ():
        torch.testing.assert_close(weight, weights[name], atol=2e-3, rtol=0)
    assert got != pytest.approx(reference(task, not predicted)[1], abs=2e-3)


def test_gradients_that_had_to_wait_leave_once(tmp_path: Path) -> None:
    """Where a rank gets more micro-batches, not all of them are late any more."""

    def fewer(number: int, rank: Rank) -> None:
        assert isinstance(rank.strategy, Delayed)
        rank.late = 2 if number < 3 else 1
        rank.strategy._await_weights = rank.seen.append  # type: ignore[method-assign]

    settings = MUON | {"delay": 1.0}
    usual = complete(Task(tmp_path / "usual", 2, settings, micro_batches=2, sequences=8))
    task = Task(tmp_path / "fewer", 2, settings, micro_batches=2, sequences=8)
    task.faults = dict.fromkeys(range(2), fewer)
    found = complete(task)
    check_equal(found, task.steps)
    assert [result["sent"] for result in found] == [result["sent"] for result in usual]
    assert all(result["seen"] == [] for result in found), "layers wait for weights that may come late"


def test_a_checkpoint_that_is_saved_again_has_all_of_it(tmp_path: Path) -> None:
    """As where no node could write the first time."""

    def save_twice(number: int, rank: Rank) -> None:
        strategy = rank.strategy
        strategy.apply_update = lambda kept: Delayed.apply_update(strategy, kept=True)  # type: ignore[method-assign,assignment,arg-type]
        if number == 2:
            for _ in range(2):
                saved = strategy.full_state_dict(in_memory)()
                rank.seen.append(sum(name.endswith(".late") for name in saved))

    task = Task(tmp_path, 2, MUON | {"delay": 1.0}, micro_batches=2, sequences=8)
    task.faults = dict.fromkeys(range(2), save_twice)
    for result in complete(task):
        first, second = result["seen"]
        assert first == second > 0


@pytest.mark.parametrize(
    "settings",
    [
        "--wire int4 --delay 0.5 --delay-after 6",
        "--wire fp32 --delay 1",
        "--wire bf16 --delay 0.3 --predicted-weights false",
    ],
)
def test_a_resume_from_any_step_changes_no_bit(settings: str, corpus: Corpus, tmp_path: Path) -> None:
    assert len(curve(stopped_and_resumed(tmp_path, corpus, 2, RUN + settings, 5)[0])) == 8


def test_a_delay_that_begins_later_changes_nothing_before(corpus: Corpus, tmp_path: Path) -> None:
    strict = curve(completed(start(tmp_path / "a", corpus, 2, RUN))[0])
    late = curve(completed(start(tmp_path / "b", corpus, 2, RUN + "--delay 0.5 --delay-after 3"))[0])
    # The first step with a delay has only the third behind it, which was waited for.
    assert [late[step] for step in range(1, 5)] == [strict[step] for step in range(1, 5)]
    assert all(late[step] != strict[step] for step in range(5, 9))


def test_who_is_slow_changes_no_bit(corpus: Corpus, tmp_path: Path) -> None:
    """A late exchange is waited for: the plan says which gradients are late, not the clock."""

    def slow_update() -> None:
        original = Delayed._update

        def update(self: Delayed, *arguments: Any) -> Any:
            time.sleep(0.2)
            return original(self, *arguments)

        Delayed._update = update  # type: ignore[method-assign]

    settings = RUN + "--wire int4 --delay 0.5"
    usual = completed(start(tmp_path / "a", corpus, 2, settings))
    slowed = completed(start(tmp_path / "b", corpus, 2, settings, {1: slow_update}))
    assert slowed[0].files("checkpoint-step-8") == usual[0].files("checkpoint-step-8")


@pytest.mark.parametrize(("world_size", "wire"), [(3, "int4"), (2, "fp32"), (1, "fp32")])
def test_other_ranks_and_plans_go_on(world_size: int, wire: str, corpus: Corpus, tmp_path: Path) -> None:
    stop_at(5, tmp_path, corpus, 2, RUN + "--wire int4 --delay 0.5")
    settings = RUN + f"--wire {wire} --delay {0.5 if world_size == 3 else 0}"
    ranks = completed(start(tmp_path, corpus, world_size, settings))
    assert ranks[0].done["step"] == 8
    assert len({trainer.files("checkpoint-step-8") for trainer in ranks}) == 1


def test_a_loss_or_gradient_that_is_not_finite_is_named_one_step_late(corpus: Corpus, tmp_path: Path) -> None:
    # Micro-batch 22 is the second of step 6; step 6 is what the sentence has to say.
    for trainer in start(tmp_path, corpus, 2, RUN + "--delay 0.5", faults={1: infinite_gradient(22)}):
        assert trainer.end() == 65, trainer.text
        assert "The gradient is not finite at step 6 on rank 1 on node1." in trainer.text
        assert trainer.checkpoints() == ["checkpoint-step-3"]


def test_with_fp16_a_step_is_left_out_and_a_resume_changes_no_bit(corpus: Corpus, tmp_path: Path) -> None:
    """The step after keeps its loss scale, which its late micro-batches had already; the one behind it has half."""
    settings = RUN + "--delay 0.5 --precision fp16 --wire int8"
    fault = infinite_gradient(14)  # the second of step 4
    straight = completed(start(tmp_path / "a", corpus, 2, settings, {1: fault}))
    assert "step 4" in straight[0].text.lower()

    stop = at_step(5, send_self(signal.SIGTERM))
    completed(start(tmp_path / "b", corpus, 2, settings, {0: stop, 1: both(fault, stop)}))
    resumed = completed(start(tmp_path / "b", corpus, 2, settings))
    assert resumed[0].files("checkpoint-step-8") == straight[0].files("checkpoint-step-8")


def test_who_hangs_in_its_update_counts_as_computing(tmp_path: Path) -> None:
    """Its main thread waits for another thread of its own; that of the other rank, for this one."""

    def own_work(number: int, rank: Rank) -> None:
        assert isinstance(rank.strategy, Delayed)
        rank.ranks.activity.begin_step(number)
        step, wait = rank.strategy._step, rank.strategy.wire.wait

        def slow_step(factor: float | None, lr: float) -> torch.Tensor:
            time.sleep(0.5)
            rank.seen.append(f"update: {rank.ranks.activity.report().doing}")  # type: ignore[arg-type]
            return step(factor, lr)

        def slow_wait(job: int) -> None:
            time.sleep(0.2)
            rank.seen.append(f"wire: {rank.ranks.activity.report().doing}")  # type: ignore[arg-type]
            wait(job)

        if number == 1:
            rank.strategy._step, rank.strategy.wire.wait = slow_step, slow_wait  # type: ignore[method-assign]

    task = Task(tmp_path, 2, MUON | {"delay": 1.0}, steps=2, sequences=4, overlap=True)
    task.faults = {0: own_work}
    seen = complete(task)[0]["seen"]
    assert "update: computing" in seen
    assert {"wire: waiting"} == {word for word in seen if word.startswith("wire")}


def test_operations_of_all_ranks_wait_for_the_exchange_where_they_have_to(tmp_path: Path) -> None:
    """As with NCCL, where those of two groups at once may wait for each other for ever."""

    def gather_beside(number: int, rank: Rank) -> None:
        assert isinstance(rank.strategy, Sharded)
        rank.ranks.before_collective = rank.strategy.complete
        rank.ranks.gather([number])
        rank.seen.append(rank.strategy.wire.submitted - rank.strategy.wire.finished)

    task = Task(
        tmp_path, 2, steps=3, sequences=4, overlap=True, faults=dict.fromkeys(range(2), gather_beside)
    )
    assert [result["seen"] for result in complete(task)] == [[0, 0, 0]] * 2
