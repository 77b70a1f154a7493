from __future__ import annotations

import pytest
import torch
from aura.cluster.ranks import Ranks
from aura.strategy.checksum import checksum

ALONE = Ranks(0, ["node0"], torch.device("cpu"))


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
