"""HRM-Text against transformers' HrmTextForCausalLM, and trained by the same loop and strategies as GPT-2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import TOKENIZER, Corpus
from aura.families.hrm_text import CALLS, HRM_TEXT, backward_depth
from aura.model import export
from aura.model.hrm_text import HrmText
from aura.plan.flops import flops_per_token
from conftest import Aura
from safetensors.torch import load_file
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from trainers import complete, start

SMALL = {"family": "hrm-text", "layers": 4, "heads": 4, "d_model": 64, "seq_len": 16, "vocab_size": 50}
RUN = "--family hrm-text --layers 2 --lr 5e-3"
TOKENS = torch.arange(32).view(2, 16) * 7 % 50


def made(**settings: object) -> TrainConfig:
    return resolve("gpt2-nano", {**SMALL, **settings})


def loss_of(model: HrmText) -> torch.Tensor:
    return model.loss_sum(TOKENS, TOKENS.roll(-1, 1))


@pytest.fixture(scope="module")
def exported(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[HrmText, Path]:
    """Larger than a model begins, so that every path counts; with rows that no token of the tokenizer has."""
    config = made(vocab_size=corpus.vocab_size + 20, vocab_multiple=64)
    model = HrmText(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    output = tmp_path_factory.mktemp("hrm") / "final"
    export.export(config, model.state_dict(), corpus.path / TOKENIZER, output)
    return model, output


def test_transformers_computes_the_same_logits(corpus: Corpus, exported: tuple[HrmText, Path]) -> None:
    from transformers import AutoModelForCausalLM, HrmTextForCausalLM

    model, output = exported
    theirs, report = HrmTextForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert torch.equal(theirs.model.z_L_init, model.z_L_init) and model.z_L_init.std() > 0.5
    tokens = torch.randint(corpus.vocab_size, (3, 16))
    with torch.no_grad():
        expected, logits = model(tokens)[..., : corpus.vocab_size], theirs.eval()(tokens).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
        assert torch.equal(export.load(output)(tokens), expected)
    assert type(AutoModelForCausalLM.from_pretrained(output)) is HrmTextForCausalLM


@pytest.mark.parametrize(("depth", "of_l"), [(3, [0, 1]), (4, [0, 2]), (5, [0, 3]), (8, [3, 3])])
def test_gradients_are_those_of_transformers_where_it_can_route_them_so(depth: int, of_l: list[int]) -> None:
    """With 2 they cannot be compared: there every call of H gets gradients, here only the last one does."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    model = HrmText(made())
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 16}
    config = HrmTextConfig(
        vocab_size=50, num_hidden_layers=2, embedding_scale=8.0, prefix_lm=False, L_bp_cycles=of_l, **shape
    )
    theirs = HrmTextForCausalLM(config)
    names = {name: HRM_TEXT.names.of(name) for name in model.state_dict()}
    theirs.load_state_dict({names[name]: tensor for name, tensor in model.state_dict().items()})
    model.depth = depth
    loss_of(model).backward()
    logits = theirs(TOKENS).logits
    functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten(), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        expected = theirs.get_parameter(names[name]).grad
        assert expected is not None and parameter.grad is not None and expected.abs().max() > 1e-3, name
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)


def test_gradients_go_deeper_over_the_first_fifth_of_a_run() -> None:
    assert [backward_depth(step, 30) for step in (0, 1, 2, 3, 4, 5, 6, 29)] == [2, 2, 3, 3, 4, 4, 5, 5]
    model = HrmText(made())
    model.begin_step(0, 30)
    loss_of(model).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == ["embed_tokens.weight"]
    shallow = model.L_module.layers[0].mlp.up_proj.weight.grad
    model = HrmText(made())
    model.begin_step(6, 30)
    loss_of(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not torch.allclose(model.L_module.layers[0].mlp.up_proj.weight.grad, shallow)


@pytest.mark.parametrize(("step", "depth"), [(0, 2), (29, 5)])
def test_the_plan_counts_the_matrix_products(step: int, depth: int) -> None:
    """Against those that torch counts. It does not count attention on a CPU, and the plan counts a gradient of the
    inputs of the first call that gets gradients, which with a depth of 2 nobody needs."""
    config = made(steps=30)
    model, tokens = HrmText(config), torch.zeros(3, 16, dtype=torch.long)
    model.begin_step(step, 30)
    with FlopCounterMode(display=False) as counter:
        model.loss_sum(tokens, tokens).backward()
    attention = (CALLS + 2 * depth) * config.layers * 2 * config.d_model * config.seq_len
    planned = 48 * (flops_per_token(config, range(step, step + 1)) - attention)
    first = 48 * 2 * 4 * 64 * 64 if depth == 2 else 0  # of queries, keys, values and the gate
    assert counter.get_total_flops() == planned - first
    shallow, deep = (flops_per_token(config, range(step, step + 1)) for step in (0, 29))
    assert shallow < flops_per_token(config) < deep


def test_a_run_of_the_smallest_formats_is_exported_and_continues_a_text(
    corpus: Corpus, tmp_path: Path, aura_says: Aura
) -> None:
    formats = "--precision bf16 --parameter-format bf16 --moment-format int8 --gradient-accumulation-steps 2"
    (trainer,) = complete(start(tmp_path, corpus, 1, f"{RUN} {formats} --gradient-checkpointing --steps 4"))
    checkpoint, final = trainer.run_dir / "checkpoints" / "checkpoint-step-4", trainer.run_dir / "final"
    assert json.loads((final / export.CONFIG).read_text())["torch_dtype"] == "bfloat16"
    drawn = load_file(checkpoint / "model.safetensors")["z_L_init"]
    assert torch.equal(drawn, load_file(final / export.MODEL)["model.z_L_init"])
    said = []
    for place in (checkpoint, final):
        words = ["--checkpoint", str(place), "--prompt", "la casa", "--tokens", "5", "--temperature", "0"]
        said.append(aura_says("sample", *words))
    assert said[0] == said[1] and said[0].startswith("la casa")


def test_another_depth_needs_no_other_kernels(graphs_only: None) -> None:
    model = HrmText(made())
    model.compile_blocks()
    graphs = []
    for step in (0, 2, 29):  # gradients through 2 calls, 3, 5
        model.begin_step(step, 30)
        loss_of(model).backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1] == graphs[2]
