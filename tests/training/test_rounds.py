"""The strategy `rounds`: ranks that train by themselves for some steps before they agree."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from aura.cluster import activity
from aura.cluster.ranks import Ranks
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.model.family import model_of
from aura.optim.muon import optimizer_of
from aura.optim.nesterov import Nesterov
from aura.plan.memory import memory_of, state_bytes
from aura.strategy.rounds import Rounds
from aura.strategy.sharded import Sharded
from safetensors.torch import load_file
from services import wait_until
from sharded_ranks import Rank, Task, batches_of, check_equal, complete, losses, parameters
from trainers import at_step, curve, send_self, start, stop_at
from trainers import complete as completed

ROUNDS = {"strategy": "rounds", "local_steps": 3, "outer_lr": 0.9, "outer_momentum": 0.5, "clip": 0.2}
MUON = {"optimizer": "muon"}
BF16 = {"precision": "bf16", "parameter_format": "bf16", "moment_format": "int8"}
RUN = "--strategy rounds --local-steps 4 --steps 12 --save-every 6 --validate-every 5 --optimizer muon --lr 0.02 "


def reference(task: Task) -> tuple[dict[str, torch.Tensor], list[float]]:
    """DiLoCo (arXiv 2311.08105, algorithm 1) in one process, torch's own SGD being the outer optimizer; with a delay
    what it comes to is added later."""
    config, shares = task.config, task.shares or (1,) * task.world_size
    everybody = [batches_of(task, rank) for rank in range(task.world_size)]
    models = [model_of(config) for _ in everybody]
    optimizers = [optimizer_of(model, config) for model in models]
    agreed = [torch.nn.Parameter(p.detach().clone()) for p in models[0].parameters()]
    momentum, late = config.outer_momentum, math.ceil(config.delay * config.local_steps)
    outer = torch.optim.SGD(agreed, config.outer_lr, momentum=momentum, nesterov=momentum > 0)
    left: list[list[torch.Tensor]] = []
    found, done = [], 0
    for step in range(task.steps):
        loss_sum = tokens = 0.0
        for model, optimizer, batches in zip(models, optimizers, everybody, strict=True):
            model.zero_grad()
            of_rank = sum(batch[:, 1:].numel() for batch in batches[step])
            for batch in batches[step]:
                loss = model.loss_sum(batch[:, :-1], batch[:, 1:])
                (loss / of_rank).backward()
                loss_sum += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step(config.lr)
            tokens += of_rank
        found.append(loss_sum / tokens)
        done, at_once = done + 1, step + 1 in task.looked_at
        with torch.no_grad():
            if left and (at_once or done == late):
                for model, before in zip(models, left, strict=True):
                    for parameter, now, then in zip(model.parameters(), agreed, before, strict=True):
                        parameter.add_(now - then)
                left = []
            if not at_once and done < config.local_steps:
                continue
            left = [[p.clone() for p in model.parameters()] for model in models]
            for place, parameter in enumerate(agreed):
                weighted = zip((parameter - own[place] for own in left), shares, strict=True)
                parameter.grad = sum(one * share for one, share in weighted) / sum(shares)
            outer.step()
            done = 0
            if at_once or not late:
                left = []
                for model in models:
                    for parameter, now in zip(model.parameters(), agreed, strict=True):
                        parameter.copy_(now)
    names = [name for name, _ in models[0].named_parameters()]
    return dict(zip(names, (p.detach() for p in agreed), strict=True)), found


@pytest.mark.parametrize(
    ("settings", "shares", "nodes"),
    [
        ({}, (), ()),
        (MUON, (), ("a", "b", "a")),
        (MUON, (6, 4, 2), ()),
        (MUON | {"outer_lr": 1.0, "outer_momentum": 0.0}, (), ()),
        ({"family": "qwen3", "kv_heads": 1, "outer_momentum": 0.9}, (), ()),
        ({"delay": 0.5}, (), ()),
        (MUON | {"delay": 1}, (6, 4, 2), ("a", "b", "a")),
    ],
    ids=str,
)
def test_ranks_learn_what_the_definition_says(
    settings: dict[str, Any], shares: tuple[int, ...], nodes: tuple[str, ...], tmp_path: Path
) -> None:
    task = Task(tmp_path, 3, ROUNDS | settings, steps=10, sequences=12, shares=shares, nodes=nodes)
    task.looked_at = (4, 10)  # the first one amid the second round
    found = complete(task)
    check_equal(found, 2 if "delay" in settings else 4)
    weights, wanted = reference(task)
    assert losses(found[0]) == pytest.approx(wanted, abs=2e-4)
    for name, weight in parameters(task).items():
        torch.testing.assert_close(weight, weights[name], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("wire", "delay"), [("bf16", 0.6), ("int8", 0), ("int4", 0), ("int4", 0.3)])
def test_unlike_processors_are_bit_equal_after_each_round_and_send_a_step_s_bytes_in_it(
    wire: str, delay: float, tmp_path: Path
) -> None:
    task = Task(tmp_path, 3, ROUNDS | MUON | {"delay": delay}, steps=9, sequences=12, wire=wire, unlike=(1,))
    task.looked_at = (9,)
    found = complete(task)
    check_equal(found, 1 if delay else 3)
    exact, _ = reference(task)
    moved = sum(float((exact[n] - p).norm() ** 2) for n, p in parameters(task).items()) ** 0.5
    assert 0 < moved < 0.2 * sum(float(p.norm() ** 2) for p in exact.values()) ** 0.5
    # The numbers of the local steps go another way.
    strict = Task(tmp_path / "strict", 3, {"clip": 0.2}, steps=3, sequences=12, wire=wire)
    assert found[0]["sent"] == complete(strict)[0]["sent"]


@pytest.mark.parametrize("settings", ["", "--delay 0.5 --wire int4"])
def test_a_run_goes_on_as_if_it_had_not_been_killed(settings: str, corpus: Corpus, tmp_path: Path) -> None:
    """Also where a checkpoint or a validation has ended a round early: all of that follows from the settings."""
    settings = RUN + settings
    straight = completed(start(tmp_path / "a", corpus, 2, settings))

    def die() -> None:
        saved = tmp_path / "b/node1/run/checkpoints/checkpoint-step-6"
        wait_until(saved.exists, 60, lambda: f"no {saved}")
        send_self(signal.SIGKILL)()

    killed = start(tmp_path / "b", corpus, 2, settings, {1: at_step(9, die)})
    assert [trainer.end() for trainer in killed] == [75, -signal.SIGKILL]
    resumed = completed(start(tmp_path / "b", corpus, 2, settings))
    expected, found = ([one.files("checkpoint-step-12") for one in ranks] for ranks in (straight, resumed))
    assert found == expected
    parameters, states = zip(*expected, strict=True)
    assert len(set(parameters)) == 1
    assert len(set(states)) == 2  # each has an optimizer of its own
    assert len(curve(straight[0])) == 12


@pytest.mark.parametrize(
    "settings",
    [{}, MUON | {"wire": "int4"}, MUON | {"wire": "bf16", "delay": 0.5}, BF16, BF16 | {"wire": "int4"}],
    ids=str,
)
def test_the_plan_knows_what_ranks_hold_and_save(settings: dict[str, Any], tmp_path: Path) -> None:
    def look(number: int, rank: Rank) -> None:
        strategy = rank.strategy
        assert isinstance(strategy, Rounds)
        shard = strategy.outer.own_shard
        held = [*strategy.agreed.views.values(), *strategy.left.values()]
        held += [*strategy.optimizer.tensors().values(), *strategy.outer.optimizer.tensors().values()]
        held += shard.views.values() if shard.master else ()
        rank.seen = [sum(tensor.nbytes for tensor in held)]

    task = Task(tmp_path, 3, ROUNDS | settings, steps=4, sequences=12, looked_at=(4,))
    task.faults = dict.fromkeys(range(3), look)
    held = [result["seen"][0] for result in complete(task)]
    assert memory_of(task.config, 4, on_gpu=False, ranks=3).moments == pytest.approx(sum(held) / 3, rel=0.01)
    saved = load_file(tmp_path / "whole-0.safetensors")
    assert state_bytes(task.config, 3) == sum(tensor.nbytes for tensor in saved.values())


def test_an_exchange_that_takes_far_longer_than_a_step_is_no_rank_that_hangs(
    corpus: Corpus, tmp_path: Path
) -> None:
    def slow() -> None:
        step, activity.LEAST, activity.TIMES = Nesterov.step, 0.3, 1.0

        def slow_step(self: Nesterov, lr: float) -> None:
            time.sleep(3)
            step(self, lr)

        Nesterov.step = slow_step  # type: ignore[method-assign]

    # The end of the round at step 6 is an exchange that nothing else waits for.
    settings = RUN + "--local-steps 6 --steps 7 --save-every 7 --validate-every 7"
    completed(start(tmp_path, corpus, 2, settings, {0: slow, 1: slow}))


def test_a_round_without_a_step_changes_nothing(tmp_path: Path) -> None:
    def spoil(number: int, rank: Rank) -> None:
        def spoiled() -> None:
            next(iter(rank.model.parameters())).grad.view(-1)[0] = math.inf  # type: ignore[union-attr]

        if number in (3, 4, 5):
            rank.after_backward = spoiled

    task = Task(tmp_path, 3, ROUNDS | MUON, steps=9, sequences=12, faults={1: spoil})
    for result in complete(task):
        left_out, bad = ([one[what] for one in result["outcomes"]] for what in ("left_out", "bad_gradient"))
        assert left_out == [False] * 3 + [True] * 3 + [False] * 3
        assert bad == [[]] * 3 + [[1]] * 3 + [[]] * 3
        first, second, third = result["sums"]
        assert first == second != third


def test_what_is_never_trained_is_made_equal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("hrm-text-100m", {"layers": 2, "d_model": 64, "heads": 2})
    model = model_of(config)
    monkeypatch.setattr(Sharded, "__init__", lambda *_: None)
    agreed = Rounds(model, Ranks(0, ["node0"], torch.device("cpu")), config).agreed
    fixed = list(model.buffers())
    assert fixed
    assert all(one is other for one, other in zip(agreed.buffers(), fixed, strict=True))


@pytest.fixture(scope="module")
def stopped(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that were asked to stop amid a round, which they have ended."""
    folder = tmp_path_factory.mktemp("stopped")
    ranks = stop_at(6, folder, corpus, 2, RUN)  # heard behind that step
    assert len({trainer.files("interrupt-step-7")[0] for trainer in ranks}) == 1
    return folder


@pytest.mark.parametrize(
    ("world_size", "settings"), [(2, ""), (3, ""), (1, ""), (2, "--strategy sharded --wire int4")]
)
def test_the_same_and_other_ranks_and_strategies_go_on(
    world_size: int, settings: str, stopped: Path, corpus: Corpus, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    ranks = completed(start(tmp_path, corpus, world_size, RUN + settings))
    assert ranks[0].done["step"] == 12
    assert len({trainer.files("checkpoint-step-12")[0] for trainer in ranks}) == 1


def test_a_run_without_rounds_goes_on_with_them(corpus: Corpus, tmp_path: Path) -> None:
    stop_at(6, tmp_path, corpus, 2, RUN + "--strategy sharded")
    ranks = completed(start(tmp_path, corpus, 2, RUN))
    assert "strategy sharded -> rounds" in ranks[0].text
    assert len({trainer.files("checkpoint-step-12")[0] for trainer in ranks}) == 1


def test_ranks_are_compared_where_they_have_agreed(corpus: Corpus, tmp_path: Path) -> None:
    (first, _) = completed(start(tmp_path, corpus, 2, RUN + "--log-every 2"))
    said = dict(re.findall(r"Step (\d+) .*Sync=(\S+)", first.text))
    # Rounds end at 4, for the validation at 5 and the checkpoint at 6, four steps later, and with the run.
    assert [step for step in said if said[step] == "OK"] == ["4", "6", "10", "12"]
    assert [*said] == ["1", "2", "4", "6", "8", "10", "12"]
    state = json.loads((first.run_dir / "checkpoints/checkpoint-step-12/state.json").read_text())
    assert state["config"]["local_steps"] == 4
