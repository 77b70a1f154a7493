"""The strategy `sharded` where ranks share a node and its link: real processes that say on which node they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aura.corpus.corpus import Corpus
from aura.plan.memory import link_bytes
from aura.strategy.by_node import cut, nodes_of, share_links
from aura.strategy.codec import bytes_of, encode
from sharded_ranks import Rank, Task, check_equal, complete, dawdle, lengths, losses, parameters
from test_delayed import MUON, RUN
from trainers import Fault, Trainer, at_step, send_self
from trainers import complete as completed
from trainers import start as start_trainers

MIXED = ("a", "b", "a")  # a node's ranks need not be neighbours
FIVE = ("a", "a", "b", "b", "c")
SEVEN = ("a", "a", "b", "b", "c", "d", "e")


def count_far_bytes(number: int, rank: Rank) -> None:
    """What goes from this rank to other nodes, and comes from them, whatever the wire counts."""
    if number:
        return
    original, nodes, seen = dist.all_to_all_single, rank.task.nodes, rank.seen
    seen += [0, 0]

    def exchange(
        received: torch.Tensor, sent: torch.Tensor, from_ranks: list[int], to_ranks: list[int], **more: Any
    ) -> Any:
        peers = dist.get_process_group_ranks(more["group"])
        far = [place for place, peer in enumerate(peers) if nodes[peer] != nodes[rank.rank]]
        if far:
            seen[0] += sent.element_size() * sum(to_ranks[place] for place in far)
            seen[1] += sent.element_size() * sum(from_ranks[place] for place in far)
        return original(received, sent, from_ranks, to_ranks, **more)

    dist.all_to_all_single = exchange


def expected_bytes(task: Task, node: Sequence[int]) -> int:
    """That leave a node: gradients to all owners elsewhere, its owners' weights to every other node, and the 4 + N
    numbers of each of its ranks to all elsewhere."""
    ranks = task.world_size
    owners = zip(*lengths(task), strict=True)
    share = [sum(bytes_of(task.wire, length) for length in of_owner) for of_owner in owners]
    inside = sum(share[rank] for rank in node)
    legs = sum(share) - inside + inside * (len(set(task.nodes)) - 1)
    return task.steps * (legs + len(node) * (ranks - len(node)) * (4 + ranks) * 8)


def check_bytes(task: Task, results: list[dict[str, Any]]) -> None:
    for node in nodes_of(task.nodes):
        expected = expected_bytes(task, node)
        assert sum(results[rank]["sent"] for rank in node) == expected
        assert [sum(results[rank]["seen"][way] for rank in node) for way in (0, 1)] == [expected, expected]


@pytest.mark.parametrize(
    ("nodes", "wire"), [(MIXED, "fp32"), (FIVE, "bf16"), (MIXED, "int8"), (FIVE, "int4")]
)
def test_ranks_stay_bit_equal_and_a_link_carries_what_one_rank_would(
    nodes: tuple[str, ...], wire: str, tmp_path: Path
) -> None:
    ranks = len(nodes)
    task = Task(tmp_path / "nodes", ranks, MUON, steps=4, sequences=2 * ranks, wire=wire, nodes=nodes)
    task.faults = dict.fromkeys(range(ranks), count_far_bytes)
    found = complete(task)
    check_equal(found, task.steps)
    check_bytes(task, found)
    alone = Task(tmp_path / "alone", 1, MUON, steps=4, sequences=2 * ranks)
    (one,) = complete(alone)
    assert losses(found[0]) == pytest.approx(losses(one), abs=1e-4 if wire == "fp32" else 0.05)
    if wire == "fp32":
        for name, tensor in parameters(alone).items():
            torch.testing.assert_close(parameters(task)[name], tensor, atol=5e-5, rtol=0)


def test_the_guides_nodes_of_2_2_1_1_1_with_a_delay(tmp_path: Path) -> None:
    task = Task(tmp_path, 7, MUON | {"delay": 0.5}, steps=2, micro_batches=2, sequences=14, wire="int4")
    task.nodes, task.faults = SEVEN, dict.fromkeys(range(7), count_far_bytes)
    found = complete(task)
    check_equal(found, task.steps)
    check_bytes(task, found)
    # The link of the fullest node, as the plan has it; the numbers of the ranks come on top.
    most = found[0]["sent"] + found[1]["sent"] - task.steps * 2 * 5 * (4 + 7) * 8
    assert most == pytest.approx(task.steps * link_bytes(task.config, 7, 5), rel=0.03)


def test_small_formats_and_other_processors(tmp_path: Path) -> None:
    small = {"precision": "bf16", "parameter_format": "bf16", "moment_format": "int8"}
    task = Task(tmp_path, 3, small, steps=3, sequences=6, wire="int4", nodes=MIXED, unlike=(2,))
    found = complete(task)
    assert [result["capability"] == "DEFAULT" for result in found] == [False, False, True]
    check_equal(found, task.steps)


def test_a_resume_changes_no_bit_and_other_nodes_go_on(tmp_path: Path) -> None:
    half = Task(tmp_path / "half", 5, MUON, steps=2, sequences=30, wire="int4", nodes=FIVE)
    complete(half)

    def goes_on(nodes: tuple[str, ...]) -> list[dict[str, Any]]:
        task = Task(tmp_path / "".join(nodes), len(nodes), MUON, 2, 2, "int4", sequences=30, nodes=nodes)
        task.resume_from = half.folder
        return complete(task)

    straight = complete(Task(tmp_path / "all", 5, MUON, steps=4, sequences=30, wire="int4", nodes=FIVE))
    assert goes_on(FIVE)[0]["sums"] == straight[0]["sums"][2:]
    for nodes in (MIXED, ("a", "b"), ("a", "a")):
        found = goes_on(nodes)
        check_equal(found, 2)
        assert losses(found[0]) == pytest.approx(losses(straight[0])[2:], abs=0.05)


def test_a_resume_of_a_delayed_run_changes_no_bit(corpus: Corpus, tmp_path: Path) -> None:
    def on_node(name: str, also: Fault = lambda: None) -> Fault:
        return lambda: (os.environ.update(AURA_NODE=name), also())[1]

    def run(folder: str, also: Fault = lambda: None) -> list[Trainer]:
        faults = {rank: on_node(name, also) for rank, name in enumerate(MIXED)}
        settings = RUN.replace("--steps 8", "--steps 6") + "--wire int4 --delay 0.5"
        return completed(start_trainers(tmp_path / folder, corpus, 3, settings, faults))

    straight = run("straight")
    run("stopped", at_step(4, send_self(signal.SIGTERM)))
    assert run("stopped")[0].files("checkpoint-step-6") == straight[0].files("checkpoint-step-6")


def test_layers_that_await_no_weights_mix_up_no_exchange(tmp_path: Path) -> None:
    """Second stages of the all-gather and first ones of the next the reduce-scatter take the same way inside the
    node."""

    def leave_out(number: int, rank: Rank) -> None:
        if number == 0:
            # The last ones, whose weights come last
            rank.model.h[1].forward = lambda x: x  # type: ignore[method-assign]
            rank.model.ln_f = torch.nn.Identity()  # type: ignore[assignment]
        if rank.rank == 0:
            dawdle(number, rank)

    task = Task(tmp_path, 3, steps=3, sequences=6, nodes=MIXED, overlap=True)
    task.faults = dict.fromkeys(range(3), leave_out)
    found = complete(task)
    assert all(result["odd"] == [] and result["outcomes"] == found[0]["outcomes"] for result in found)


def test_ranks_and_parts_of_a_node() -> None:
    assert nodes_of(("b", "a", "b", "c")) == [[0, 2], [1], [3]]
    assert share_links(MIXED) and not share_links(("a", "a")) and not share_links(("a", "b"))
    assert not share_links(("a",))
    for count in (0, 1, 127, 128, 129, 1000, 128 * 7):
        for parts in (1, 2, 3, 8):
            lengths = cut(count, parts)
            assert sum(lengths) == count and len(lengths) == parts
            full = -(-count // 128)
            assert all(length <= -(-full // parts) * 128 for length in lengths)
            places = [sum(lengths[:part]) for part in range(parts)]
            assert all(place % 128 == 0 or place == count for place in places)
            assert sum(bytes_of("int4", length) for length in lengths) == bytes_of("int4", count)
    # In parts or in one piece the codes are the same.
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    halves = [encode(part, "int4") for part in torch.split(values, cut(1000, 2))]
    assert torch.equal(torch.cat([half[: 64 * 4] for half in halves]), encode(values, "int4")[: 64 * 8])
