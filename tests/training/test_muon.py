"""Muon: its formula, and the trainer with it, with real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aura.config import resolve
from aura.families.known import FAMILIES
from aura.model.family import model_of
from aura.model.gpt import GPT
from aura.optim import muon
from aura.plan.flops import update_flops
from aura.strategy.buckets import owners
from aura.strategy.owner_shard import OwnerShard
from aura.strategy.sharded import whole_matrices
from torch.utils.flop_counter import FlopCounterMode

SMALL = {"layers": 1, "d_model": 32, "seq_len": 16, "vocab_size": 50, "optimizer": "muon"}
MATRICES = {f"h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


def test_a_matrix_of_zeros_stays_so() -> None:
    assert muon.orthogonalised(torch.zeros(1, 4, 6)).count_nonzero() == 0


def test_the_matrices_of_the_blocks_are_its_own_and_the_rest_is_adamw() -> None:
    config = resolve("gpt2-nano", SMALL)
    models = [GPT(config), GPT(config)]
    both = [muon.optimizer_of(models[0], config), muon.AdamW(models[1], config)]
    for model, mine in zip(models, both, strict=True):
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        mine.step(1e-2)
    names = set(both[0].tensors())
    assert {name.removesuffix(".momentum") for name in names if name.endswith(".momentum")} == MATRICES
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter, models[1].get_parameter(name)) == (name not in MATRICES), name
        assert (f"{name}.exp_avg" in names) == (name not in MATRICES)


def test_it_is_muon_by_the_book() -> None:
    """Three steps in fp64, with the polynomial applied to the singular values. Queries, keys and values are a matrix
    each."""
    config = resolve("gpt2-nano", SMALL)
    model = GPT(config)
    mine = muon.optimizer_of(model, config)
    expected = {name: model.get_parameter(name).detach().double() for name in MATRICES}
    momentum = {name: torch.zeros_like(value) for name, value in expected.items()}
    torch.manual_seed(0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for name, value in expected.items():
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradient.double()
            looked_ahead = 0.95 * momentum[name] + 0.05 * gradient.double()
            parts = value.split(32) if "c_attn" in name else [value]
            updates = []
            for part, wanted in zip(parts, looked_ahead.split(len(parts[0])), strict=True):
                u, s, vh = torch.linalg.svd(wanted, full_matrices=False)
                s /= s.square().sum().sqrt()
                for _ in range(5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                updates.append(0.2 * max(part.shape) ** 0.5 * (u * s @ vh))
            expected[name] = value * (1 - 1e-2 * config.weight_decay) - 1e-2 * torch.cat(updates)
        mine.step(1e-2)
    for name, value in expected.items():
        assert torch.allclose(model.get_parameter(name).double(), value, atol=1e-5), name


GPT2 = {"layers": 9, "d_model": 32}  # more square matrices than one has rows
QWEN3 = {"family": "qwen3", "layers": 3, "d_model": 64, "heads": 4, "kv_heads": 2}


@pytest.mark.parametrize("shape", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["whole", "owned"])
def test_matrices_of_one_shape_can_go_together(shape: dict[str, Any], ranks: int) -> None:
    """As on a GPU, in stacks of several sizes, against one after the other. Of an owner c_attn's parts are segments."""
    config = resolve("gpt2-nano", SMALL | shape)
    results = []
    for most in (1, 10_000, 1 << 24):
        torch.manual_seed(0)
        model = model_of(config)
        shard = None
        if ranks > 1:
            parameters, whole = dict(model.named_parameters()), whole_matrices(model)
            owned = owners({name: tuple(p.shape) for name, p in parameters.items()}, whole, ranks)
            shard = OwnerShard(parameters, owned[0], set(whole))
        updated = shard or model
        mine = muon.optimizer_of(updated, config)
        assert isinstance(mine, muon.Muon)
        assert all(len(names) == 1 for names in mine.stacks), "a CPU takes them one by one"
        mine.stacks = list(muon.stacks(mine.shapes, most))
        results.append(list(map(len, mine.stacks)))
        for _ in range(2):
            for parameter in dict(updated.named_parameters()).values():
                parameter.grad = torch.randn(parameter.shape) * torch.rand(())
            mine.step(1e-2)
        numbers = {name: p.detach().clone() for name, p in updated.named_parameters()} | mine.tensors()
        if most == 1:
            expected = numbers
        for name, number in numbers.items():
            assert (number - expected[name]).norm() <= 1e-6 * expected[name].norm(), (name, most)
    one_by_one, few, many = results
    assert set(one_by_one) == {1} and len(many) < len(few) < len(one_by_one)


def test_a_stack_has_no_more_than_it_may() -> None:
    shapes = {f"small.{i}": (1, 8, 2) for i in range(5)} | {f"large.{i}": (3, 8, 8) for i in range(2)}
    stacks = list(muon.stacks(shapes, 40))
    assert stacks == [["small.0", "small.1"], ["small.2", "small.3"], ["small.4"], ["large.0"], ["large.1"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_its_work_is_that_of_five_iterations(family: str) -> None:
    """Against the matrix products that torch counts."""
    config = resolve("gpt2-nano", {**SMALL, "family": family, "layers": 4, "heads": 2})
    model = model_of(config)
    optimizer = muon.optimizer_of(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        optimizer.step(1e-2)
    assert update_flops(config) == counter.get_total_flops()
    of_a_block = {"gpt2": 4, "hrm-text": 8, "qwen3": 7}[family]
    momenta = [name for name in optimizer.tensors() if name.endswith(".momentum")]
    assert len(momenta) == of_a_block * 4
