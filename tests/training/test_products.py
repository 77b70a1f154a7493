"""Matrix products on the processor: whoever makes them, they are those of torch."""

from __future__ import annotations

import pytest
import torch
from aura import products
from aura.config import resolve
from aura.model.gpt import GPT
from torch.nn import functional

# Of Linux on an EPYC 9005, without what says nothing here, and the same of others; synthetic.
AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512vl\n"


@pytest.mark.parametrize(
    ("cpuinfo", "faster"),
    [
        (AMD + "\n" + AMD, True),
        (AMD.replace(" avx512f avx512vl", ""), False),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_onednn_is_taken_where_mkl_does_without_avx512(cpuinfo: str, faster: bool) -> None:
    assert products.onednn_is_faster(cpuinfo) is faster


@pytest.fixture(params=[False, True], ids=["torch", "oneDNN"])
def whose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "ONEDNN", request.param)
    return bool(request.param)


@pytest.mark.parametrize("shape", [(24,), (7, 24), (2, 7, 24)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_those_of_torch(
    whose: bool, shape: tuple[int, ...], with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    x, weight, bias = numbers(*shape), numbers(40, 24), numbers(40) if with_bias else None
    wanted = [tensor for tensor in (x, weight, bias) if tensor is not None]
    upstream = torch.randn(*shape[:-1], 40, generator=generator)
    ours, torchs = products.linear(x, weight, bias), functional.linear(x, weight, bias)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(*(torch.autograd.grad(made, wanted, upstream) for made in (ours, torchs)))
    with torch.no_grad():
        flat = x.reshape(-1, 24)
        torch.testing.assert_close(products.product(flat, weight.t()), flat @ weight.t())


def test_what_needs_no_gradient_gets_none(whose: bool) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    products.linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_a_compiled_model_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN", True)
    model = GPT(resolve("gpt2-nano", {"layers": 1, "d_model": 64, "heads": 2, "seq_len": 16}))
    tokens = torch.randint(model.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    losses, gradients = [], []
    for compiled in (False, True):
        if compiled:
            model.compile_blocks()
        model.zero_grad()
        loss = model.loss_sum(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_other_formats_stay_as_they_are(whose: bool) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight).dtype == torch.bfloat16
    assert products.product(x.bfloat16(), weight.bfloat16().t()).dtype == torch.bfloat16
