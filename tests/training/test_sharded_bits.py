"""The strategy `sharded` with integer codes on the wire: five real processes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aura.config import resolve
from aura.model.gpt import GPT
from aura.plan.memory import memory_of, wire_bytes
from aura.plan.shapes import shape_of
from aura.strategy.codec import bytes_of
from aura.strategy.pieces import owners, rounds
from aura.strategy.sharded import _round_count, whole_matrices
from safetensors.torch import load_file
from sharded_ranks import LINK_MBIT, Rank, Task, complete, parameters, shards

MUON = {"optimizer": "muon"}
BF16 = {"precision": "bf16", "parameter_format": "bf16", "moment_format": "int8"}
WIRES = ["int8", "int4"]


def losses(result: dict[str, Any]) -> list[float]:
    return [outcome["loss_sum"] / outcome["tokens"] for outcome in result["outcomes"]]


def bytes_of_a_step(task: Task) -> int:
    """That all ranks send: both legs, and the 4 + N numbers of everybody to everybody."""
    model, ranks = GPT(task.config), task.world_size
    matrices = whole_matrices(model) if task.config.optimizer == "muon" else {}
    owned = owners({name: tuple(p.shape) for name, p in model.named_parameters()}, matrices, ranks)
    lengths = [
        length for one in rounds(owned, _round_count(owned, task.wire, LINK_MBIT)) for length in one.lengths
    ]
    legs = 2 * sum(bytes_of(task.wire, length) for length in lengths)
    return (ranks - 1) * (legs + ranks * (4 + ranks) * 8)


@pytest.mark.parametrize(
    ("settings", "wire"),
    [({}, "int4"), (MUON, "int8"), (BF16, "int4")],
    ids=["adamw", "muon", "smallest formats"],
)
def test_ranks_stay_bit_equal_and_learn_what_they_learn_with_all_bits(
    settings: dict[str, Any], wire: str, tmp_path: Path
) -> None:
    few = Task(tmp_path / "few", 5, settings, steps=12, wire=wire, unlike=(3,))
    found, exact = complete(few), complete(Task(tmp_path / "exact", 5, settings, steps=12))
    assert [result["capability"] == "DEFAULT" for result in found] == [False, False, False, True, False]
    assert all(result["sums"] == found[0]["sums"] and result["odd"] == [] for result in found)
    assert all(result["outcomes"] == found[0]["outcomes"] for result in found)
    assert losses(found[0]) != losses(exact[0])
    assert losses(found[0])[-1] == pytest.approx(losses(exact[0])[-1], abs=0.1)
    assert sum(result["sent"] for result in found) == few.steps * bytes_of_a_step(few)


@pytest.mark.parametrize("settings", [{}, BF16], ids=["adamw", "smallest formats"])
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


@pytest.mark.parametrize("settings", [MUON, BF16], ids=["muon", "smallest formats"])
def test_a_resume_changes_no_bit_and_other_ranks_and_formats_go_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    half = Task(tmp_path / "half", 5, settings, steps=3, sequences=30, wire="int4")
    complete(half)
    same = Task(tmp_path / "again", 5, settings, 3, 3, "int4", sequences=30, resume_from=half.folder)
    straight = complete(Task(tmp_path / "straight", 5, settings, steps=6, sequences=30, wire="int4"))
    assert complete(same)[0]["sums"] == straight[0]["sums"][3:]
    whole = load_file(half.folder / "whole-0.safetensors")
    for name, tensor in parameters(half).items():
        assert whole[f"{name}.master"].dtype == torch.float32
        assert whole[f"{name}.master"].shape == tensor.shape
    for ranks, wire in ((3, "int4"), (5, "fp32"), (1, "fp32")):
        name = f"{ranks} {wire}"
        other = Task(tmp_path / name, ranks, settings, 3, 3, wire, sequences=30, resume_from=half.folder)
        found = complete(other)
        assert all(result["sums"] == found[0]["sums"] for result in found)
        assert losses(found[0]) == pytest.approx(losses(straight[0])[3:], abs=0.05)
    # A checkpoint without weights of the owners' own, as fp32 and bf16 write it
    back = Task(tmp_path / "back", 5, settings, 6, 3, "int4", sequences=30, resume_from=tmp_path / "5 fp32")
    assert all(math.isfinite(loss) for loss in losses(complete(back)[0]))


@pytest.mark.parametrize("wire", WIRES)
def test_a_gradient_that_is_not_finite_names_its_rank_and_changes_nothing(wire: str, tmp_path: Path) -> None:
    def spoil(number: int, rank: Rank) -> None:
        if number == 3:
            parameter = rank.model.h[1].mlp.c_fc.weight
            index = torch.tensor(9)
            handle = parameter.register_hook(lambda grad: grad.index_fill(0, index, math.nan))
            rank.after_backward = handle.remove

    for result in complete(Task(tmp_path, 3, sequences=6, wire=wire, faults={1: spoil})):
        assert [outcome["left_out"] for outcome in result["outcomes"]] == [number == 3 for number in range(6)]
        assert result["outcomes"][3]["bad_gradient"] == [1]
        assert result["sums"][3] == result["sums"][2] and len(set(result["sums"])) == 5


@pytest.mark.parametrize("wire", WIRES)
def test_the_plan_knows_the_bytes_and_the_owners_weights(wire: str) -> None:
    config = resolve("gpt2", {"wire": wire})
    assert wire_bytes(config) == bytes_of(wire, shape_of(config).stored)
    exact = memory_of(replace(config, wire="fp32"), 1, on_gpu=False, ranks=5)
    master = 4 * shape_of(config).stored / 5
    assert memory_of(config, 1, on_gpu=False, ranks=5).moments - exact.moments == pytest.approx(master, abs=1)
    assert memory_of(config, 1, on_gpu=False) == memory_of(replace(config, wire="fp32"), 1, on_gpu=False)
