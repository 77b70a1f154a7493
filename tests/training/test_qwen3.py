"""Qwen3 against transformers' Qwen3ForCausalLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import TOKENIZER, Corpus
from aura.families.qwen3 import QWEN3
from aura.model import export
from aura.model.qwen3 import Qwen3
from aura.plan.flops import flops_per_token
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

SMALL = {"family": "qwen3", "layers": 2, "heads": 6, "d_model": 96, "seq_len": 24, "vocab_size": 50}


def made(**settings: object) -> TrainConfig:
    return resolve("gpt2-nano", {**SMALL, **settings})


def random_model(config: TrainConfig) -> Qwen3:
    """Gains are random too: those of 1 would hide whether the norm or the rotation comes first."""
    torch.manual_seed(0)
    model = Qwen3(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.3, 1.7)
        else:
            parameter.data.normal_(std=0.1)
    return model


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_transformers_computes_the_same_logits_and_gradients(
    tied: str, kv_heads: int, corpus: Corpus, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    rows = corpus.vocab_size
    config = made(tied=tied, kv_heads=kv_heads, vocab_size=rows + 20, vocab_multiple=64)
    model = random_model(config)
    for table in (model.embed_tokens, model.lm_head):
        if table is not None:
            table.weight.data[rows:] = 0  # no token of the tokenizer is one of these
    export.export(config, model.state_dict(), corpus.path / TOKENIZER, tmp_path / "final")
    theirs, report = Qwen3ForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "final")) is Qwen3ForCausalLM

    tokens = torch.randint(rows, (3, 24))
    expected, logits = model(tokens)[..., :rows], theirs(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        back = export.load(tmp_path / "final")
        assert torch.equal(back(tokens), model(tokens)[..., :rows])

    for some in (expected, logits):
        functional.cross_entropy(some.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    assert ("lm_head.weight" in model.state_dict()) == (tied == "false")
    for name, parameter in model.named_parameters():
        wanted, mine = theirs.get_parameter(QWEN3.names.of(name)).grad, parameter.grad
        assert wanted is not None and mine is not None and wanted.abs().max() > 1e-4, name
        torch.testing.assert_close(mine[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)


def test_who_reads_the_configuration_elsewhere_finds_the_width_of_a_head_and_the_rotation(
    corpus: Corpus, tmp_path: Path
) -> None:
    config = made(kv_heads=2, vocab_size=corpus.vocab_size)
    export.export(config, random_model(config).state_dict(), corpus.path / TOKENIZER, tmp_path / "final")
    values = json.loads((tmp_path / "final" / export.CONFIG).read_text())
    assert (values["head_dim"], values["num_key_value_heads"], values["intermediate_size"]) == (16, 2, 256)
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 10000
    assert (values["bos_token_id"], values["eos_token_id"]) == (0, 0)


@pytest.mark.parametrize("settings", [{}, {"kv_heads": 2}, {"tied": "false"}])
def test_the_plan_counts_the_matrix_products(settings: dict[str, object]) -> None:
    """Against those that torch counts, which counts no attention on a CPU. The plan has gains among its parameters."""
    config = made(**settings)
    model, tokens = Qwen3(config), torch.zeros(3, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss_sum(tokens, tokens).backward()
    attention = 12 * config.layers * config.d_model * config.seq_len
    gains = 6 * sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    planned = 72 * (flops_per_token(config) - attention - gains)
    assert counter.get_total_flops() == planned
