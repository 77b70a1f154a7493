from __future__ import annotations

import pytest
import torch
from aura.config import TrainConfig, resolve
from aura.families.known import FAMILIES
from aura.model.family import model_of
from aura.model.gpt import GPT
from aura.model.loss import LinearCrossEntropy
from aura.plan.shapes import parameter_count
from torch.nn import functional

SMALL = {"layers": 2, "heads": 2, "d_model": 32, "seq_len": 16, "vocab_size": 50}


@pytest.fixture
def config() -> TrainConfig:
    return resolve("gpt2-nano", SMALL)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_changes_nothing_before_it(family: str) -> None:
    model = model_of(resolve("gpt2-nano", {**SMALL, "family": family}))
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_dropout_only_while_training() -> None:
    model = GPT(resolve("gpt2-nano", {**SMALL, "dropout": 0.5}))
    tokens = torch.randint(50, (1, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{"loss_chunk": 5}, {"gradient_checkpointing": True}, {"vocab_multiple": 64}],
    ids=["loss in pieces", "blocks recomputed", "padded vocabulary"],
)
def test_what_saves_memory_or_time_changes_nothing(settings: dict[str, object], family: str) -> None:
    """Loss and gradients agree to the rounding of another order of additions."""
    torch.manual_seed(0)
    configs = [resolve("gpt2-nano", {**SMALL, "family": family, **more}) for more in ({}, settings)]
    plain, other = (model_of(config) for config in configs)
    tokens, targets = torch.randint(50, (3, 16)), torch.randint(50, (3, 16))
    losses = [model.loss_sum(tokens, targets) for model in (plain, other)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for name, parameter in other.named_parameters():
        expected = plain.get_parameter(name).grad
        assert expected is not None and parameter.grad is not None
        torch.testing.assert_close(parameter.grad[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    (embedding,) = [
        p for name, p in other.named_parameters() if name in ("wte.weight", "embed_tokens.weight")
    ]
    assert len(embedding) == (64 if "vocab_multiple" in settings else 50)
    assert other(tokens).shape == (3, 16, 50)
    assert other.parameter_count() == plain.parameter_count() == parameter_count(configs[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradients_of_the_loss_are_those_of_the_plain_formula(compiled: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 8), torch.randn(64, 8)
    targets = torch.randint(50, (20,))
    results = []
    for plain in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if plain:
            loss = functional.cross_entropy(h @ w[:50].T, targets, reduction="sum")
        else:
            loss = LinearCrossEntropy.apply(h, w, targets, 50, 7, torch.tensor(512.0), compiled)
        (loss * 1024).backward()  # twice as much as it was told
        results.append((loss, h.grad, w.grad))
    for wanted, got in zip(*results, strict=True):
        assert wanted is not None and got is not None
        assert torch.allclose(wanted, got, rtol=1e-4, atol=1e-3)


def test_blocks_that_are_alike_share_their_kernels(graphs_only: None) -> None:
    counts = []
    for layers in (2, 5):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = GPT(resolve("gpt2-nano", {**SMALL, "layers": layers}))
        model.compile_blocks()
        model.loss_sum(torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)).backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == [2, 2]  # a block, and the loss


@torch._dynamo.config.patch(recompile_limit=8)
def test_no_length_of_a_micro_batch_is_left_to_run_without_kernels(graphs_only: None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = GPT(resolve("gpt2-nano", SMALL))
    model.compile_blocks(lengths=12)
    for length in range(1, 13):
        tokens = torch.ones(length, 16, dtype=torch.int64)
        model.loss_sum(tokens, tokens).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * 12


def test_many_chunks_are_as_exact_as_one(graphs_only: None) -> None:
    """Added up in bf16, the gradient of the output matrix would be 20 times as far off with 64 chunks, and a softmax in
    bf16 would give another loss."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1024, 32).bfloat16(), torch.randn(500, 32).bfloat16().float()
    targets = torch.randint(500, (1024,))
    exact = weight.double().requires_grad_()
    wanted = functional.cross_entropy(hidden.double() @ exact.T, targets, reduction="sum")
    wanted.backward()
    errors = []
    for chunk, compiled in ((1024, False), (1024, True), (16, False)):
        w = weight.clone().requires_grad_()
        loss = LinearCrossEntropy.apply(hidden, w, targets, 500, chunk, None, compiled)
        loss.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
        assert exact.grad is not None and w.grad is not None
        errors.append((w.grad - exact.grad).norm() / exact.grad.norm())
    assert max(errors) < 1.1 * errors[0]


def test_small_probabilities_survive_fp16() -> None:
    """The gradient of an unlikely word is its probability, here 1e-9, where fp16 ends at 6e-8."""
    weight = torch.tensor([[21.0], [0.0]], dtype=torch.float16, requires_grad=True)
    hidden = torch.ones(1, 1, dtype=torch.float16)
    for scale, survives in ((None, False), (torch.tensor(2.0**16), True)):
        weight.grad = None
        loss = LinearCrossEntropy.apply(hidden, weight, torch.tensor([0]), 2, 1, scale)
        (loss if scale is None else loss * scale).backward()
        assert weight.grad is not None
        assert (weight.grad[1].item() > 0) == survives


def test_the_same_seed_gives_the_same_model_in_every_format() -> None:
    one, again = GPT(resolve("gpt2-nano", SMALL)), GPT(resolve("gpt2-nano", SMALL))
    small = {**SMALL, "parameter_format": "bf16", "precision": "bf16", "vocab_multiple": 64}
    half = GPT(resolve("gpt2-nano", small))
    other = GPT(resolve("gpt2-nano", {**SMALL, "seed": 1}))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter.bfloat16(), half.get_parameter(name)[: len(parameter)])
    assert not torch.equal(one.wte.weight, other.wte.weight)
    assert not half.wte.weight[50:].any()
