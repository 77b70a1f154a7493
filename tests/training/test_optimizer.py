from __future__ import annotations

import shutil
import sys

import pytest
import torch
from aura.config import resolve
from aura.optim import adamw as optimizer
from aura.optim import gradient_sum
from aura.optim.gradient_sum import GradientSum


def adamw(model: torch.nn.Module, **settings: object) -> optimizer.AdamW:
    return optimizer.AdamW(model, resolve("gpt2-nano", {"beta2": 0.95, "weight_decay": 0.1, **settings}))


def test_it_is_adamw_by_the_book() -> None:
    """Algorithm 2 of Loshchilov and Hutter (2019), in fp64, against five steps in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    mine = adamw(model)
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
    mine = adamw(model)
    before = model.weight.detach().clone()
    model(torch.ones(2)).sum().backward()
    mine.step(lr=0.1)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("format", "tolerance"), [("bf16", 0.02), ("int8", 0.1)])
def test_small_moments_go_the_same_way(format: str, tolerance: float) -> None:
    """After 50 steps with noisy gradients, the parameters have moved as with fp32 moments, but for a few percent."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(40, 30) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    before = models[0].weight.detach().clone()
    optimizers = [adamw(models[0]), adamw(models[1], moment_format=format)]
    scale = torch.logspace(-6, 0, 1200).view(30, 40)  # gradients of very different size
    for _ in range(50):
        gradient = (torch.randn(30, 40) + 0.5) * scale
        for model, mine in zip(models, optimizers, strict=True):
            model.weight.grad, model.bias.grad = gradient.clone(), torch.ones(30)
            mine.step(1e-2)
    moved, wanted = models[1].weight - before, models[0].weight - before
    assert (moved - wanted).norm() < tolerance * wanted.norm()
    assert (moved - wanted).norm() > 0


def test_eight_bits_keep_small_numbers_and_never_make_a_square_zero() -> None:
    value = torch.cat([torch.logspace(-9, 0, 300), torch.zeros(20)])
    code, scales = optimizer.compress(value, signed=False, seed=1)
    assert (code.dtype, len(scales)) == (torch.uint8, 2)
    back = optimizer.expand(code, scales)
    assert torch.equal(back == 0, value == 0)
    signed = torch.cat([-value, value])
    code, scales = optimizer.compress(signed, signed=True, seed=1)
    assert code.dtype == torch.int8
    back = optimizer.expand(code, scales)
    large = signed.abs() > 1e-2
    assert torch.allclose(back[large], signed[large], rtol=0.15)
    assert (back * signed >= 0).all()


@pytest.mark.parametrize(("format", "beta2"), [("int8", 0.95), ("int8", 0.999), ("bf16", 0.999)])
def test_small_moments_follow_stationary_gradients(format: str, beta2: float) -> None:
    """Means of both moments over 5,000 steps, against fp32: what is rounded must be able to fall as well as to rise."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat(16, 64)  # each in every block
    models = [torch.nn.Linear(256, 16, bias=False) for _ in range(2)]
    both = [
        adamw(model, beta2=beta2, weight_decay=0, moment_format=format)
        for model, format in zip(models, ("fp32", format), strict=True)
    ]
    means = torch.zeros(2, 2, 16, 256)
    for _ in range(5000):
        gradient = (torch.randn(16, 256) + 0.3) * sizes
        for model, mine, mean in zip(models, both, means, strict=True):
            model.weight.grad = gradient
            mine.step(1e-4)
            tensors = mine.tensors()
            moments = [tensors[f"weight.{kind}"] for kind in ("exp_avg", "exp_avg_sq")]
            if "weight.scales" in tensors:
                scales = tensors["weight.scales"]
                moments = [optimizer.expand(c.view(-1), s) for c, s in zip(moments, scales, strict=True)]
            mean += torch.stack([moment.view(16, 256) for moment in moments])
    expected, found = means.view(2, 2, 16, 64, 4).sum(dim=(2, 3))
    assert torch.allclose(found, expected, rtol=0.05)


def test_a_moment_of_eight_bits_decays_where_no_gradient_comes() -> None:
    model = torch.nn.Linear(256, 1, bias=False)
    mine = adamw(model, weight_decay=0, moment_format="int8")
    for step in range(200):
        model.weight.grad = torch.ones(1, 256)
        model.weight.grad[0, 1:] *= 1e-3 * (step < 50)
        mine.step(1e-4)
    code, scales = mine.tensors()["weight.exp_avg"], mine.tensors()["weight.scales"]
    assert optimizer.expand(code.view(-1), scales[0])[1:].abs().max() < 1e-5


def test_random_rounding_keeps_the_mean_and_is_the_same_everywhere() -> None:
    value = torch.full((100_000,), 1 + 1 / 512)  # half-way between two neighbours would be 1 + 1/256
    value[1::2] *= -1
    rounded = optimizer.round_at_random(value, seed=5)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert set(rounded.abs().tolist()) == {1.0, 1 + 1 / 128}
    assert rounded.abs().mean().item() == pytest.approx(1 + 1 / 512, abs=1e-4)
    assert torch.equal(rounded, optimizer.round_at_random(value, seed=5))
    assert not torch.equal(rounded, optimizer.round_at_random(value, seed=6))
    exact = torch.tensor([0.0, -2.0, 1.5])
    assert torch.equal(optimizer.round_at_random(exact, seed=1), exact)
    # What a card's sum says where there is no number
    no_number = torch.full((1000,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert optimizer.round_at_random(no_number, seed=1).to(torch.bfloat16).isnan().all()
    assert (optimizer.round_at_random(no_number.fill_(-torch.inf), seed=1) == -torch.inf).all()
    # On whatever processor: a card that drew others would round otherwise than the ranks beside it.
    assert optimizer._random_bits(exact, seed=1).tolist() == [824515495, 1722258072, 3753300549]


@pytest.mark.parametrize("moment_format", optimizer.MOMENT_TYPES)
def test_tiny_updates_of_bf16_parameters_add_up(moment_format: str) -> None:
    """Rounded to nearest, 1 - 1e-3 * lr would stay 1 for ever."""
    model = torch.nn.Linear(100, 100, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    mine = adamw(model, weight_decay=0, moment_format=moment_format, seed=3)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        mine.step(1e-4)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.float().mean().item() == pytest.approx(1 - 100 * 1e-4, abs=1e-3)


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for piece in (1 << 22, 512):
        monkeypatch.setattr(optimizer, "PIECE", piece)
        torch.manual_seed(0)
        model = torch.nn.Linear(50, 40)
        mine = adamw(model, moment_format="int8")
        for _ in range(3):
            model.weight.grad, model.bias.grad = torch.randn(40, 50), torch.randn(40)
            mine.step(1e-2)
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[untyped-decorator]
def test_the_compiled_update_is_the_same_in_a_few_passes() -> None:
    """Tolerance: the last bits of a power may differ, and with them here and there the way something is rounded."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    metrics.reset()
    counters.clear()
    ends = []
    for compiled in ("false", "true"):
        torch.manual_seed(0)
        # Of 15, 16 and 8 blocks; and one that does not consist of whole blocks
        model = torch.nn.Sequential(
            *(torch.nn.Linear(*size) for size in ((128, 30), (64, 64), (32, 64), (33, 17)))
        )
        model.to(torch.bfloat16)
        mine = adamw(model, moment_format="int8", seed=3, compile=compiled)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            mine.step(1e-2 / (step + 1))
        ends.append(mine.tensors() | {name: p.detach() for name, p in model.named_parameters()})
    for name, eager in ends[0].items():
        off = (ends[1][name].double() - eager.double()).abs()
        # Neighbours among the numbers of the format, and few of them
        apart = 1.0 if eager.dtype in (torch.int8, torch.uint8) else 0.01 * eager.double().abs().max()
        assert off.max() <= apart and (off > 0.1 * apart).double().mean() < 0.02, name
    # Compiled once, whatever the length and the learning rate; about 200 operations are a few loops.
    assert counters["stats"]["unique_graphs"] == 1
    assert 1 <= metrics.generated_kernel_count <= 6


def sums_of(gradients: list[torch.Tensor], at_random: bool, position: int = 0) -> torch.Tensor:
    """What autograd has added up in a parameter of bf16."""
    model = torch.nn.Linear(gradients[0].shape[1], gradients[0].shape[0], bias=False).to(torch.bfloat16)
    if at_random:
        GradientSum(model, seed=1).begin_step(position)
    for gradient in gradients:
        (model.weight * gradient).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.bfloat16
    return model.weight.grad


def test_small_gradients_of_many_micro_batches_are_not_lost() -> None:
    """One large gradient and 15 small ones: rounded to nearest, the sum stays what the first was."""
    gradients = [torch.ones(300, 300, dtype=torch.bfloat16)]
    gradients += [torch.full((300, 300), 2.0**-10, dtype=torch.bfloat16)] * 15
    expected = 1 + 15 / 1024
    assert sums_of(gradients, at_random=False).float().mean().item() == 1
    summed = sums_of(gradients, at_random=True)
    assert summed.float().mean().item() == pytest.approx(expected, abs=2e-4)
    assert set(summed.float().unique().tolist()) <= {1 + ups / 128 for ups in range(16)}
    # The same again, and others at another place in the data
    assert torch.equal(summed, sums_of(gradients, at_random=True))
    assert not torch.equal(summed, sums_of(gradients, at_random=True, position=16))


def test_a_sum_that_bf16_holds_is_exact_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(30, 40, dtype=torch.bfloat16)
    assert torch.equal(sums_of([ones, 2 * ones, 4 * ones], at_random=True), 7 * ones)
    noisy = [torch.randn(30, 40).to(torch.bfloat16) for _ in range(3)]
    monkeypatch.setattr(gradient_sum, "PIECE", 256)
    exact = torch.stack([gradient.float() for gradient in noisy]).sum(0)
    summed = sums_of(noisy, at_random=True)
    assert ((summed.float() - exact).abs() <= 2 / 64 * exact.abs().clamp(min=1)).all()
    noisy[1][3, 4], noisy[1][5, 6] = torch.inf, torch.nan
    summed = sums_of(noisy, at_random=True)
    assert summed[3, 4] == torch.inf and summed[5, 6].isnan() and summed.isfinite().sum() == 30 * 40 - 2


def test_what_is_drawn_in_every_step_is_not_remembered_for_ever() -> None:
    for step in range(5000):
        optimizer.mix_seed(step, "weight", 0)
    assert optimizer._seed_of.cache_info().currsize < 5000
