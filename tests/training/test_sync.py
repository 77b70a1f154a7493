from __future__ import annotations

import pytest
import torch
from aura.cluster.ranks import Ranks
from aura.strategy import data_parallel as sync
from aura.strategy.checksum import checksum
from aura.strategy.data_parallel import DataParallel
from torch import nn

ALONE = Ranks(0, ["node0"], torch.device("cpu"))


def test_gradients_stay_in_their_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "BUCKET_BYTES", 100)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))  # 64 and 16 bytes each
    strategy = DataParallel(model, ALONE)
    assert [bucket.nbytes for bucket in strategy.buckets] == [80, 80, 80]
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    reference.load_state_dict(model.state_dict())
    for _ in range(2):  # the second time after zero_gradients
        strategy.zero_gradients()
        reference.zero_grad()
        for _ in range(3):
            x = torch.randn(4)
            model(x).square().sum().backward()
            reference(x).square().sum().backward()
        strategy.reduce_gradients()
        strategy.scale_gradients(1 / 8)
        flat = torch.cat(strategy.buckets)
        expected = torch.cat([p.grad.flatten() / 8 for p in reference.parameters() if p.grad is not None])
        assert torch.allclose(flat, expected)
        assert strategy.gradient_norm() == pytest.approx(expected.norm().item(), rel=1e-5)
        strategy.scale_gradients(0.5)
        assert torch.allclose(model[0].weight.grad, reference[0].weight.grad / 16)


def test_a_gradient_outside_its_bucket_is_an_error() -> None:
    model = nn.Linear(4, 4)
    strategy = DataParallel(model, ALONE)
    model.zero_grad(set_to_none=True)
    model(torch.ones(4)).sum().backward()
    with pytest.raises(AssertionError, match="left its bucket"):
        strategy.reduce_gradients()


def test_a_parameter_larger_than_a_bucket_has_its_own() -> None:
    groups = sync._buckets([nn.Parameter(torch.zeros(n)) for n in (10, 8_000_000, 10, 10)])
    assert [[p.numel() for p in group] for group in groups] == [[10], [8_000_000], [10, 10]]


def test_the_checksum_sees_every_bit_and_every_place() -> None:
    tensors = [torch.randn(5, 3), torch.randn(7)]
    before = checksum(tensors)
    assert before == checksum([tensor.clone() for tensor in tensors])
    assert before != checksum(tensors[::-1])
    for bit in (0, 31):
        tensors[1].view(torch.int32)[6] ^= torch.tensor(-(2**31) if bit == 31 else 1, dtype=torch.int32)
        assert before != checksum(tensors)
        tensors[1].view(torch.int32)[6] ^= torch.tensor(-(2**31) if bit == 31 else 1, dtype=torch.int32)
    assert before == checksum(tensors)


def test_the_minority_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, odd in (([1, 1, 2], [2]), ([2, 1, 1], [0]), ([5, 6], [1]), ([3, 3], [])):
        monkeypatch.setattr(Ranks, "gather", lambda self, value, values=values: [[v] for v in values])
        assert ALONE.odd_ones(0) == odd
