"""The strategy `sharded` with five real processes."""

from __future__ import annotations

import math
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aura.strategy import wire as wire_module
from aura.strategy.codec import bytes_of
from aura.strategy.sharded import Sharded
from safetensors.torch import load_file
from sharded_ranks import (
    Rank,
    Task,
    check_equal,
    complete,
    dawdle,
    lengths,
    losses,
    parameters,
    shards,
    start,
)
from trainers import send_self

MUON = {"optimizer": "muon"}
LATE = {"clip": 0.2, "delay": 0.5}
QWEN = {"family": "qwen3", "kv_heads": 1}
HRM = {"family": "hrm-text", "lr": 5e-3, "vocab_size": 1500}
MIXED = ("a", "b", "a")  # a node's ranks need not be neighbours
SMALLEST = {"precision": "bf16", "parameter_format": "bf16", "moment_format": "int8"}


def elements(task: Task) -> int:
    return sum(tensor.numel() for tensor in parameters(task).values())


@pytest.mark.parametrize(
    ("settings", "wire"),
    [
        ({}, "fp32"),
        (MUON, "fp32"),
        ({}, "bf16"),
        ({}, "int4"),
        (MUON, "int8"),
        (SMALLEST, "int4"),
        *((MUON | LATE, wire) for wire in ("fp32", "bf16")),
        (QWEN, "bf16"),
        (QWEN | {"tied": "false"}, "fp32"),
        (QWEN | SMALLEST, "int4"),
        (QWEN | MUON | LATE, "int8"),
        (HRM | MUON | LATE, "int4"),
    ],
    ids=str,
)
def test_unlike_processors_stay_bit_equal_and_learn_what_one_learns(
    settings: dict[str, Any], wire: str, tmp_path: Path
) -> None:
    five = Task(tmp_path / "five", 5, settings, steps=10, wire=wire, unlike=(3,))
    if settings.keys() >= LATE.keys():
        five.micro_batches, five.sequences, five.steps = 2, 20, 6
    results = complete(five)
    assert [result["capability"] == "DEFAULT" for result in results] == [False, False, False, True, False]
    check_equal(results, five.steps)
    # Both directions, and the 4 + 5 numbers of everybody to everybody
    legs = 2 * sum(bytes_of(wire, length) for one in lengths(five) for length in one)
    sent, numbers = sum(result["sent"] for result in results), five.steps * 5 * 4 * (4 + 5) * 8
    assert sent - numbers == five.steps * 4 * legs
    if wire == "fp32":
        assert legs == 2 * elements(five) * 4
        for result in results:
            assert result["sent"] == pytest.approx(five.steps * 2 * elements(five) * 4 * 4 / 5, rel=0.03)
    if five.micro_batches == 1:
        (one,) = complete(Task(tmp_path / "one", 1, settings, steps=10))
        near = 1e-4 if wire == "fp32" else 0.02 if wire == "bf16" else 0.1
        assert losses(one)[-1] == pytest.approx(losses(results[0])[-1], abs=near)
        assert wire in ("int8", "int4") or losses(one) == pytest.approx(losses(results[0]), abs=near)
        assert wire == "fp32" or losses(one) != losses(results[0])
        assert losses(one)[-1] < losses(one)[0] - 0.5


@pytest.mark.parametrize("settings", [{}, HRM | MUON], ids=["gpt2", "hrm-text"])
def test_accumulation_and_layers_that_arrive_late(settings: dict[str, Any], tmp_path: Path) -> None:
    """Nobody waits for the weights but the layers themselves; several micro-batches are one step."""
    settings = settings | {"batch_size": 1}
    at_once = Task(tmp_path / "a", 5, settings, sequences=20)
    pieces = Task(tmp_path / "b", 5, settings, sequences=20, micro_batches=4, overlap=True)
    pieces.faults = {0: dawdle, 4: dawdle}
    expected, found = complete(at_once), complete(pieces)
    assert losses(found[0]) == pytest.approx(losses(expected[0]), abs=1e-5)
    assert all(result["odd"] == [] and result["outcomes"] == found[0]["outcomes"] for result in found)


def test_a_layer_awaits_its_own_weights_alone_and_gradients_leave_during_the_backward_pass(
    tmp_path: Path,
) -> None:
    def look(number: int, rank: Rank) -> None:
        strategy, awaited, gone = rank.strategy, [], []
        assert isinstance(strategy, Sharded)
        original = strategy._await_weights
        strategy._await_weights = lambda bucket: (awaited.append(bucket), original(bucket))[1]  # type: ignore[method-assign]
        rank.model.wte.weight.register_hook(lambda _: gone.append(strategy.next_bucket))
        rank.seen = [awaited, gone]

    task = Task(tmp_path, 2, {"layers": 4}, steps=1, sequences=4, faults={0: look, 1: look})
    for result in complete(task):
        awaited, gone = result["seen"]  # round 0, the last to come, is that of the last layer
        assert awaited == sorted(awaited, reverse=True) and awaited[0] > 1, awaited
        # Before the embedding, whose gradient is the last one
        assert gone and min(gone) >= 1


def test_the_slowest_link_decides_the_rounds_of_all(tmp_path: Path) -> None:
    def look(number: int, rank: Rank) -> None:
        assert isinstance(rank.strategy, Sharded)
        rank.seen = [len(rank.strategy.buckets)]

    task = Task(tmp_path, 3, sequences=6, steps=1, links=(1000, 1, 1000))
    task.faults = dict.fromkeys(range(3), look)
    assert len(lengths(task)) > 1
    assert [result["seen"] for result in complete(task)] == [[len(lengths(task))]] * 3


@pytest.mark.parametrize(
    ("what", "wire", "guilty", "nodes"),
    [
        ("loss", "fp32", 1, ()),
        ("gradient", "fp32", 1, ()),
        ("gradient in fp16", "fp32", 1, ()),
        ("gradient", "int8", 1, ()),
        ("gradient", "int4", 1, ()),
        ("gradient", "fp32", 2, MIXED),  # the second rank of its node
        ("gradient", "int4", 2, MIXED),
        ("gradient", "int4", 1, MIXED),  # the only one
    ],
)
def test_what_is_not_finite_names_its_rank_and_changes_nothing(
    what: str, wire: str, guilty: int, nodes: tuple[str, ...], tmp_path: Path
) -> None:
    def spoil(number: int, rank: Rank) -> None:
        if number != 3:
            return
        if what == "loss":
            rank.spoiled_loss = math.nan
        else:
            bad, index = math.nan if nodes else math.inf, torch.tensor(9)
            parameter = rank.model.h[1].mlp.c_fc.weight
            handle = parameter.register_hook(lambda grad: grad.index_fill(0, index, bad))
            rank.after_backward = handle.remove

    task = Task(tmp_path, 3, sequences=6, wire=wire, nodes=nodes, faults={guilty: spoil})
    task.loss_scale = 1024 if "fp16" in what else 1
    for result in (results := complete(task)):
        bad = [outcome for outcome in result["outcomes"] if outcome["left_out"]]
        assert [outcome["left_out"] for outcome in result["outcomes"]] == [number == 3 for number in range(6)]
        expected = ([guilty], []) if what == "loss" else ([], [guilty])
        assert (bad[0]["bad_loss"], bad[0]["bad_gradient"]) == expected
        assert result["sums"][3] == result["sums"][2] and len(set(result["sums"])) == 5
        assert result["sums"] == results[0]["sums"]
    # The optimizer has not seen it either.
    assert all(t.item() == 5 for shard in shards(task) for name, t in shard.items() if ".step" in name)


def test_a_loss_scale_changes_no_bit(tmp_path: Path) -> None:
    plain, scaled = (
        complete(Task(tmp_path / str(s), 2, sequences=4, loss_scale=s))[0] for s in (1.0, 4096.0)
    )
    assert plain["sums"] == scaled["sums"]
    for one, other in zip(plain["outcomes"], scaled["outcomes"], strict=True):
        assert one["gradient_norm"] == other["gradient_norm"]


@pytest.mark.parametrize(
    ("frozen", "nodes"),
    [(2, ()), (1, ("a", "a", "b")), (2, ("a", "a", "b"))],
    ids=["every rank has its node", "on the same node", "on another node"],
)
def test_a_frozen_rank_is_noticed_within_seconds(frozen: int, nodes: tuple[str, ...], tmp_path: Path) -> None:
    def freeze(number: int, rank: Rank) -> None:
        if nodes:
            wire_module.SHORTEST = 5.0
        (tmp_path / f"step-{rank.rank}").write_text(str(number))
        if number == 12 and rank.rank == frozen:
            send_self(signal.SIGSTOP)()

    task = Task(tmp_path, 3, {"collective_timeout": 600}, steps=1000, sequences=6, nodes=nodes)
    task.faults = dict.fromkeys(range(3), freeze)
    processes = start(task)
    others = [rank for rank in range(3) if rank != frozen]
    try:
        for rank in others:
            processes[rank].join(90)
            assert processes[rank].exitcode == 75
    finally:
        for process in processes:
            process.kill()
    assert (tmp_path / f"step-{frozen}").read_text() == "12"
    said = [(tmp_path / f"failed-{rank}.txt").read_text() for rank in others]
    if nodes and frozen == 1:
        # Nothing of rank 0's is on its way to another node: it waits for what comes first.
        assert "inside the node)" in said[0], said
        return
    # At least four seconds; on a busy machine what is usual takes longer.
    waits = re.findall(r"no answer from another rank within ([0-9.]+) s", " ".join(said))
    assert len(waits) == 2 or (nodes and waits), said
    assert all(4 <= float(wait) < 60 for wait in waits), said
    assert not any("inside the node" in sentence for sentence in said), said


def test_a_delay_that_was_announced_is_waited_for(tmp_path: Path) -> None:
    def dally(number: int, rank: Rank) -> None:
        wire_module.SHORTEST = 2.0 if number == 12 else 8.0
        if number == 12:
            rank.strategy.expect_delay()
            time.sleep(4 * rank.rank)  # as in a validation; for longer than a frozen rank would be waited for

    complete(Task(tmp_path, 2, steps=14, sequences=4, faults=dict.fromkeys(range(2), dally)))


@pytest.mark.parametrize(
    "settings", [{}, MUON, SMALLEST, QWEN | MUON], ids=["adamw", "muon", "smallest formats", "qwen3"]
)
def test_three_and_one_go_on_where_five_have_stopped(settings: dict[str, Any], tmp_path: Path) -> None:
    five = Task(tmp_path / "five", 5, settings, steps=3, sequences=30)
    complete(five)
    saved = shards(five)
    wholes = [load_file(five.folder / f"whole-{rank}.safetensors") for rank in range(5)]
    assert wholes[1] == {}
    assert all(by_element([whole]) == by_element(saved) for whole in wholes if whole)
    same = complete(going_on(five, "again"))
    straight = complete(replace(five, folder=tmp_path / "straight", steps=6))
    assert same[0]["sums"] == straight[0]["sums"][3:]
    # Gradients and weights go over the wire in the format that they have.
    width, numbers = 2 if settings is SMALLEST else 4, 6 * 5 * 4 * (4 + 5) * 8
    assert sum(result["sent"] for result in straight) == 6 * 2 * elements(five) * 4 * width + numbers
    for ranks in (3, 1):
        # Nothing is lost on the way: what they have is what was saved.
        only_loaded = going_on(five, f"{ranks} loaded", world_size=ranks, steps=0)
        complete(only_loaded)
        assert by_element(shards(only_loaded)) == by_element(saved)
        found = complete(going_on(five, f"{ranks}", world_size=ranks))
        assert all(result["sums"] == found[0]["sums"] for result in found)
        tolerance = 1e-4 if settings is not SMALLEST else 2e-2  # other random numbers round
        assert losses(found[0]) == pytest.approx(losses(straight[0])[3:], abs=tolerance)
    # In the names and shapes of a rank that is alone
    (alone,) = shards(only_loaded)  # the last of them: of one rank
    expected, whole = ({name: (t.shape, t.dtype) for name, t in one.items()} for one in (alone, wholes[0]))
    assert whole == expected
    assert by_element([alone]) == by_element(saved)
    back = going_on(only_loaded, "back", world_size=5)
    complete(back)
    assert by_element(shards(back)) == by_element(saved)


def going_on(task: Task, name: str, **changes: Any) -> Task:
    """From where it has ended, in step 3."""
    return replace(task, folder=task.folder.with_name(name), first=3, resume_from=task.folder, **changes)


def by_element(parts: list[dict[str, torch.Tensor]]) -> dict[str, list[float]]:
    """<parameter>.<kind>: its numbers in order, whoever has them."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            kind, _, place = name.partition("[")
            found.setdefault(kind, {})[int(place.split(":")[0] or 0) if place else 0] = tensor
    numbers = {}
    for kind, tensors in found.items():
        rows = 2 if kind.endswith(".scales") else 1
        whole = torch.cat([tensors[start].view(rows, -1) for start in sorted(tensors)], 1)
        numbers[kind] = whole.flatten().tolist()[: 1 if kind.endswith(".step") else None]
    return numbers


def test_only_parameters_that_differ_are_sent_at_the_start(tmp_path: Path) -> None:
    def part(number: int, rank: Rank) -> None:
        sent: list[int] = []
        for name in ("send", "recv", "broadcast"):
            original = getattr(dist, name)

            def note(tensor: torch.Tensor, other: int, original: Any = original) -> Any:
                sent.append(tensor.numel())
                return original(tensor, other)

            setattr(dist, name, note)
        if rank.rank in parted:
            # Two changes that cancel in the sum of all words
            words = rank.model.wpe.weight.data.view(torch.int32)
            words[3, 5] += 1
            words[9, 7] -= 1
        rank.strategy.start()
        rank.strategy.start()
        rank.seen = sent

    # To one that lacks it it is sent; many pass it on.
    for parted, part_in_it in (((1,), {0, 1}), ((1, 2), {0, 1, 2})):
        folder = tmp_path / str(len(parted))
        task = Task(folder, 3, steps=1, sequences=6, faults=dict.fromkeys(range(3), part))
        for number, result in enumerate(complete(task)):
            assert result["seen"] == ([16 * 64] if number in part_in_it else [])
            assert result["odd"] == []


def test_parameters_without_a_gradient_count_as_zeros(tmp_path: Path) -> None:
    """The last positions are never used; then a whole layer is left out, by one rank and by all."""

    def leave_out(number: int, rank: Rank) -> None:
        if rank.rank == 0 or number == 3:
            rank.model.h[1].forward = lambda x: x  # type: ignore[method-assign]

    faults = dict.fromkeys(range(2), leave_out)
    two = Task(tmp_path / "two", 2, steps=5, sequences=4, faults=faults)
    results = complete(two)
    assert results[0]["sums"] == results[1]["sums"] and len(set(results[0]["sums"])) == 5
    assert all(not outcome["left_out"] for outcome in results[0]["outcomes"])
    everywhere = dict.fromkeys(range(2), lambda number, rank: leave_out(3, rank))
    both = Task(tmp_path / "both", 2, steps=5, sequences=4, faults=everywhere)
    alone = Task(tmp_path / "alone", 1, steps=5, sequences=4, faults=everywhere)
    (expected,) = complete(alone)
    assert losses(complete(both)[0]) == pytest.approx(losses(expected), abs=1e-4)
    for name, tensor in parameters(alone).items():
        assert torch.allclose(parameters(both)[name], tensor, atol=1e-3), name


@pytest.mark.parametrize("settings", [{}, SMALLEST], ids=["adamw", "smallest formats"])
def test_what_a_step_rounds_off_is_in_the_next_one(settings: dict[str, Any], tmp_path: Path) -> None:
    """Everybody's weights stay near the owners', however many steps there are."""
    distances = []
    for steps in (4, 16):
        task = Task(tmp_path / str(steps), 3, settings, steps=steps, sequences=6, wire="int4")
        complete(task)
        everybodys = parameters(task)
        distance = [
            (everybodys[name].view(-1)[slice(*map(int, place[:-1].split(":")))].float() - master).norm()
            for shard in shards(task)
            for text, master in shard.items()
            if ".master[" in text
            for name, _, place in [text.replace(".master", "").partition("[")]
        ]
        distances.append(float(torch.stack(distance).norm()))
    assert 0 < distances[1] < 1.5 * distances[0]


@pytest.mark.parametrize("settings", [MUON, SMALLEST, QWEN | MUON], ids=["muon", "smallest formats", "qwen3"])
def test_a_resume_changes_no_bit_and_other_ranks_and_formats_go_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    half = Task(tmp_path / "half", 5, settings, steps=3, sequences=30, wire="int4")
    complete(half)
    straight = complete(replace(half, folder=tmp_path / "straight", steps=6))
    assert complete(going_on(half, "again"))[0]["sums"] == straight[0]["sums"][3:]
    whole = load_file(half.folder / "whole-0.safetensors")
    for name, tensor in parameters(half).items():
        assert whole[f"{name}.master"].dtype == torch.float32
        assert whole[f"{name}.master"].shape == tensor.shape
    for ranks, wire in ((3, "int4"), (5, "fp32"), (1, "fp32")):
        found = complete(going_on(half, f"{ranks} {wire}", world_size=ranks, wire=wire))
        assert all(result["sums"] == found[0]["sums"] for result in found)
        assert losses(found[0]) == pytest.approx(losses(straight[0])[3:], abs=0.05)
    # A checkpoint without weights of the owners' own, as fp32 and bf16 write it
    back = Task(tmp_path / "back", 5, settings, 6, 3, "int4", sequences=30, resume_from=tmp_path / "5 fp32")
    assert all(math.isfinite(loss) for loss in losses(complete(back)[0]))
