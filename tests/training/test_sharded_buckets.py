"""Who owns what, how long a wait may be, and the names of the optimizer's state: without any process."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig, resolve
from aura.errors import DataError
from aura.model.gpt import GPT
from aura.plan.memory import memory_of, wire_bytes
from aura.plan.shapes import shape_of
from aura.strategy import buckets, wire
from aura.strategy.buckets import Bucket, Shard, cut_into_buckets, newton_schulz_work, owners
from aura.strategy.checksum import checksum
from aura.strategy.codec import bytes_of
from aura.strategy.collectives import GradientSum
from aura.strategy.interface import STOP, SUSPECT, clip_factor, global_stats_of
from aura.strategy.sharded import BUCKET_BYTES, _bucket_count, whole_matrices
from aura.strategy.state import take
from aura.strategy.wire import ENOUGH, SHORTEST, AdaptiveTimeout

GIGABIT = 118e6  # bytes of payload per second


def cut(
    config: TrainConfig, ranks: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, int], list[list[Shard]]]:
    model = GPT(config, "meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    whole = whole_matrices(model) if config.optimizer == "muon" else {}
    return shapes, whole, owners(shapes, whole, ranks)


def test_a_gradient_is_shortened_to_the_clip_and_never_stretched() -> None:
    norms = (0.0, 0.5, 1.0, 4.0)
    assert [clip_factor(norm, 1.0, tokens=10) for norm in norms] == [0.1, 0.1, 0.1, 0.025]


def test_who_wants_to_stop_and_who_cannot_trust_its_numbers() -> None:
    rows = [[3.0, 10.0, 0.0, 100.0, 0.0, 0.0], [5.0, 10.0, 0.0, 300.0, 0.0, 0.0]]
    usual = global_stats_of(rows)
    assert (usual.loss, usual.gradient_norm, usual.tokens) == (0.4, 1.0, 20)
    assert not (usual.stopping or usual.suspect or usual.left_out)
    rows[1][2] = STOP
    assert (global_stats_of(rows).stopping, global_stats_of(rows).suspect) == (True, False)
    rows[0][2] = SUSPECT
    assert (global_stats_of(rows).stopping, global_stats_of(rows).suspect) == (True, True)
    rows[0][3] = rows[1][3] = 0.0
    assert global_stats_of(rows).gradient_norm == 0 and not global_stats_of(rows).left_out
    rows[0][3] = -math.inf  # what a sum of squares that overflows may become
    assert global_stats_of(rows).left_out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("preset", ["gpt2-nano", "gpt2", "gpt2-medium"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_every_element_has_one_owner_and_shares_are_equal(preset: str, optimizer: str, ranks: int) -> None:
    shapes, whole, owned = cut(resolve(preset, {"optimizer": optimizer}), ranks)
    found = {
        name: sorted((s.start, s.stop) for stream in owned for s in stream if s.name == name)
        for name in shapes
    }
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        assert found[name][0][0] == 0 and found[name][-1][1] == count
        assert all(before[1] == after[0] for before, after in zip(found[name], found[name][1:], strict=False))
        if name in whole:
            assert len(found[name]) == whole[name]
        assert all(stop % 128 == 0 or stop == count for _, stop in found[name])
    shares = [sum(map(len, stream)) for stream in owned]
    if (preset, ranks) != ("gpt2-nano", 8) or optimizer == "adamw":  # 12 matrices for 8
        assert max(shares) - min(shares) <= 2 * buckets.GRAIN


def test_the_work_of_newton_schulz_is_balanced() -> None:
    for ranks in (2, 3, 5, 8):
        shapes, whole, owned = cut(resolve("gpt2-medium", {"optimizer": "muon"}), ranks)
        work = []
        for stream in owned:
            matrices = [segment for segment in stream if segment.name in whole]
            sizes = [(shapes[s.name][0] // whole[s.name], shapes[s.name][1]) for s in matrices]
            assert [rows * columns for rows, columns in sizes] == [len(segment) for segment in matrices]
            work.append(sum(newton_schulz_work(*size) for size in sizes))
        assert max(work) * ranks == sum(work)
    # A long matrix is less work than square ones of as many elements.
    small = {"long": (8 * 64, 64)} | {str(number): (64, 64) for number in range(8)}
    assert sorted(map(len, owners(small, dict.fromkeys(small, 1), 2))) == [2, 7]


def test_rounds_are_short_and_have_a_piece_for_every_owner() -> None:
    for optimizer in ("adamw", "muon"):
        shapes, _, owned = cut(resolve("gpt2-medium", {"optimizer": optimizer}), 5)
        cut_up = cut_into_buckets(owned, _bucket_count(owned, "fp32", 1000))
        for owner, stream in enumerate(owned):
            sent = [shard for bucket in cut_up for shard in bucket.shards[owner]]
            assert sum(map(len, sent)) == sum(map(len, stream))
            assert sum(bucket.lengths[owner] for bucket in cut_up) == sum(map(len, stream))
        assert all(min(bucket.lengths) > 0 for bucket in cut_up)
        largest = max(4 * (len(owned) - 1) * max(bucket.lengths) for bucket in cut_up)
        assert largest <= BUCKET_BYTES + 4 * 4 * buckets.GRAIN and largest / GIGABIT < 0.5
        # The first gradients do not wait for the last ones: a round needs what is about as far back as itself.
        backward = list(reversed(shapes))
        for number, bucket in enumerate(cut_up[: len(cut_up) // 2]):
            needed = max(backward.index(name) for name in bucket.names) / len(backward)
            assert needed < 1.2 * (number + 1) / len(cut_up) + 0.1
    unequal = cut_into_buckets([[Shard("w", 0, 1000)], [Shard("w", 1000, 1300)]], 2)
    assert [bucket.lengths for bucket in unequal] == [[512, 300], [488, 0]]


def test_a_small_model_has_fewer_rounds_where_each_would_be_over_in_no_time() -> None:
    _, _, owned = cut(resolve("gpt2-nano"), 5)
    speeds = (10_000, 1000, 300, 100, 10)
    assert [_bucket_count(owned, "fp32", mbit) for mbit in speeds] == [1, 2, 6, 16, 16]


def test_fewer_bits_are_fewer_rounds_of_a_large_model() -> None:
    _, _, owned = cut(resolve("gpt2-medium"), 5)
    counts = [_bucket_count(owned, wire, 1000) for wire in ("fp32", "bf16", "int8", "int4")]
    assert counts == [271, 136, 69, 35]
    # The longest stream counts, though another owner has nothing.
    assert _bucket_count([[Shard("w", 0, 100 * 2**20)], []], "fp32", 1000) == 100


def test_patience_follows_the_usual_wait() -> None:
    patience = AdaptiveTimeout(longest=600)
    patience.add("weights", 50)  # the first step: not remembered
    patience.delayed = False
    for _ in range(ENOUGH - 1):
        patience.add("weights", 0.1)
    assert patience.seconds("weights") == 600
    patience.add("weights", 0.1)
    assert patience.seconds("weights") == SHORTEST
    assert patience.seconds("gradients") == 600
    for wait in (10.0, 20.0, 30.0) * 30:
        patience.add("gradients", wait)
    assert patience.seconds("gradients") == 20 + 10 * 10
    patience.add("weights", 19.0)  # who has stalled may again
    assert patience.seconds("weights") == 2 * 19
    patience.delayed = True
    assert patience.seconds("weights") == 600


def test_patience_lasts_for_a_step_that_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(wire, "time", clock)
    patience, now = AdaptiveTimeout(longest=60), 0.0
    patience.step_is_done()  # the first one
    for seconds in (20.0, 21.0, 22.0):
        now += seconds
        patience.step_is_done()
    patience.delayed = True
    now += 500  # a validation
    patience.step_is_done()
    for _ in range(ENOUGH):
        patience.add("gradients", 0.1)
    assert patience.seconds("gradients") == 21.1
    for _ in range(ENOUGH):  # of a fast card, beside one that takes the whole step and now twice as long
        patience.add("first gradients", 17.0)
    assert patience.seconds("first gradients") == 17 + 21


def test_numbers_are_added_in_the_order_of_the_ranks() -> None:
    rows = [[1e16, 8.0, 0.0, 1.0, 0, 0, 0], [1.0, 8.0, 1.0, 3.0, 0, 0, 0], [-1e16, 8.0, 0.0, 0.0, 0, 0, 0]]
    outcome = global_stats_of(rows)
    assert outcome.loss_sum == 1e16 + 1.0 - 1e16
    assert (outcome.tokens, outcome.gradient_norm, outcome.stopping) == (24, 2 / 24, True)
    assert not outcome.left_out
    rows[0][5] = 1.0
    assert global_stats_of(rows).bad_gradient == [1] and global_stats_of(rows).left_out
    rows[0][5], rows[2][3] = 0.0, float("inf")
    assert global_stats_of(rows).bad_gradient == [] and global_stats_of(rows).left_out
    rows[1][0] = float("nan")
    assert global_stats_of(rows).bad_loss == [1]


def test_the_norm_of_a_gradient_may_be_larger_than_what_fp32_squares() -> None:
    total = GradientSum(torch.zeros(4), world_size=2)
    total.add_up(Bucket(0, (4, 4), ()), [torch.full((4,), 1e30)] * 2)
    assert total.squares.item() == pytest.approx(4 * 4e60)


def test_a_state_of_another_model_is_refused() -> None:
    whole = {"w.exp_avg": torch.zeros(10, 100), "w.step": torch.tensor(7.0)}
    for name, stop, kind in (("v", 500, "exp_avg"), ("w", 1500, "exp_avg"), ("v", 500, "step")):
        with pytest.raises(DataError, match=f"no {name}.{kind} that fits"):
            take(whole, Shard(name, 0, stop), kind, torch.zeros(() if kind == "step" else stop))


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_the_plan_knows_the_bytes_and_the_owners_weights(wire: str) -> None:
    config = resolve("gpt2", {"wire": wire})
    assert wire_bytes(config) == bytes_of(wire, shape_of(config).stored)
    exact = memory_of(replace(config, wire="fp32"), 1, on_gpu=False, ranks=5)
    master = 4 * shape_of(config).stored / 5
    assert memory_of(config, 1, on_gpu=False, ranks=5).moments - exact.moments == pytest.approx(master, abs=1)
    assert memory_of(config, 1, on_gpu=False) == memory_of(replace(config, wire="fp32"), 1, on_gpu=False)


def test_the_checksum_sees_every_bit_and_every_place() -> None:
    tensors = [torch.randn(5, 3), torch.randn(7)]
    before = checksum(tensors)
    assert before == checksum([tensor.clone() for tensor in tensors])
    assert before != checksum(tensors[::-1])
    for bit in (1, -(2**31)):
        for is_flipped in (True, False):
            tensors[1].view(torch.int32)[6] ^= torch.tensor(bit, dtype=torch.int32)
            assert (before != checksum(tensors)) == is_flipped


def test_the_minority_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, odd in (([1, 1, 2], [2]), ([2, 1, 1], [0]), ([5, 6], [1]), ([3, 3], [])):
        monkeypatch.setattr(Ranks, "gather", lambda self, value, values=values: [[v] for v in values])
        assert Ranks(0, ["node0"], torch.device("cpu")).odd_ones(0) == odd
