from __future__ import annotations

import math

import pytest
import torch
from aura.config import TrainConfig, resolve
from aura.model import GPT
from torch.nn import functional

SMALL = {"layers": 2, "heads": 2, "d_model": 32, "seq_len": 16, "vocab_size": 50}


@pytest.fixture
def config() -> TrainConfig:
    return resolve("gpt2-nano", SMALL)


def test_the_medium_preset_has_the_parameters_of_gpt2_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, **_: tensor)  # slow without memory
    with torch.device("meta"):
        assert GPT(resolve("gpt2-medium")).parameter_count() == 354_823_168


def test_the_nano_preset_has_the_parameters_that_the_formula_gives() -> None:
    config = resolve("gpt2-nano")
    d = config.d_model
    block = 12 * d * d + 13 * d  # four matrices with biases, two LayerNorms
    expected = (config.vocab_size + config.seq_len) * d + config.layers * block + 2 * d
    assert GPT(config).parameter_count() == expected


def test_a_token_changes_nothing_before_it(config: TrainConfig) -> None:
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_attention_is_the_textbook_formula(config: TrainConfig) -> None:
    torch.manual_seed(0)
    attention = GPT(config).h[0].attn
    x = torch.randn(1, 16, 32)
    q, k, v = attention.c_attn(x).split(32, dim=2)
    heads = []
    for part in (slice(0, 16), slice(16, 32)):
        scores = q[0, :, part] @ k[0, :, part].T / math.sqrt(16)
        scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(dim=1) @ v[0, :, part])
    expected = attention.c_proj(torch.cat(heads, dim=1))
    assert torch.allclose(attention(x)[0], expected, rtol=1e-5, atol=1e-6)


def test_the_loss_is_summed_over_all_targets(config: TrainConfig) -> None:
    torch.manual_seed(0)
    model = GPT(config)
    tokens, targets = torch.randint(50, (3, 16)), torch.randint(50, (3, 16))
    log_p = functional.log_softmax(model(tokens), dim=-1)
    expected = -log_p.gather(2, targets[..., None]).sum()
    assert model.loss_sum(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    # An untrained model knows nothing.
    assert model.loss_sum(tokens, targets).item() / 48 == pytest.approx(math.log(50), rel=0.02)


def test_dropout_only_while_training() -> None:
    torch.manual_seed(0)
    model = GPT(resolve("gpt2-nano", {**SMALL, "dropout": 0.5}))
    tokens = torch.randint(50, (1, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
