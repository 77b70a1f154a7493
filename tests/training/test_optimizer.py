from __future__ import annotations

import sys

import pytest
import torch
from aura import optimizer


def test_it_is_adamw_by_the_book() -> None:
    """Algorithm 2 of Loshchilov and Hutter (2019), in fp64, against five steps in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    mine = optimizer.AdamW(model, beta1=0.9, beta2=0.95, weight_decay=0.1)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(value) for name, value in expected.items()}
    v = {name: torch.zeros_like(value) for name, value in expected.items()}
    for t in range(1, 6):
        lr = 1e-2 * t
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            g = parameter.grad.double()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            step = (m[name] / (1 - 0.9**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            decay = 0.1 if name == "weight" else 0.0  # biases do not decay
            expected[name] = expected[name] - lr * (step + decay * expected[name])
        mine.step(lr)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
        assert torch.allclose(mine.tensors()[f"{name}.exp_avg_sq"].double(), v[name], rtol=1e-5)
    assert mine.tensors()["bias.step"] == 5


def test_it_does_not_import_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # to import it is an error now
    model = torch.nn.Linear(2, 2)
    mine = optimizer.AdamW(model, beta1=0.9, beta2=0.95, weight_decay=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(2)).sum().backward()
    mine.step(lr=0.1)
    assert not torch.equal(model.weight, before)
