"""The recipe: rates by name, what begins at zero, batch and rates by size and length; a model for so many hours."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aura.commands import plan as plan_command
from aura.config import LATER, TrainConfig, resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.families.known import FAMILIES
from aura.model.family import model_of
from aura.optim.groups import group_of
from aura.optim.muon import optimizer_of
from aura.plan import auto, gpus
from aura.plan.shapes import parameter_count
from aura.recipe import recipe
from aura.run.directory import steps_done

SMALL = {"layers": 2, "heads": 2, "d_model": 32, "seq_len": 16, "vocab_size": 50}
NAMED = {"lr": 1e-2, "embedding_lr": 3e-2, "gain_lr": 5e-3, "weight_decay": 0.1}


def small(family: str, **settings: Any) -> TrainConfig:
    return resolve("gpt2-nano", {**SMALL, "family": family, **settings})


def moved(config: TrainConfig, steps: int = 1, lr: float = 1e-2) -> dict[str, torch.Tensor]:
    """By how much each parameter has changed after steps with the same random gradients."""
    model = model_of(config)
    optimizer = optimizer_of(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(lr)
    return {name: (p.detach() - before[name]).double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_kind_of_parameter_has_its_own_rate(family: str, optimizer: str) -> None:
    """AdamW's first step is the rate, but for decay, and what the schedule makes of one it makes of all."""
    untied = FAMILIES[family].shape(small(family)).tied is False
    rates = {**NAMED, "decay_embeddings": False, "optimizer": optimizer}
    config = small(family, **rates, **({"head_lr": 2e-2} if untied else {}))
    for name, change in moved(config, lr=config.lr / 2).items():
        if name.startswith(FAMILIES[family].embeddings):
            expected = config.embedding_lr / 2
        elif name.startswith("lm_head"):
            expected = config.head_lr / 2
        elif change.dim() == 1:
            expected = config.gain_lr / 2
        else:
            continue  # decays, or is Muon's
        assert change.abs().median().item() == pytest.approx(expected, rel=2e-2), name


@pytest.mark.parametrize("formats", [{}, {"moment_format": "int8"}, {"moment_format": "bf16"}])
def test_a_rate_is_that_of_the_group_in_every_number_format(formats: dict[str, str]) -> None:
    """Where only the embedding has another one, it moves as in a run of that rate, and the rest as before."""
    whole, faster = moved(small("gpt2", **formats), 3), moved(small("gpt2", **formats), 3, lr=4e-2)
    mixed = moved(small("gpt2", lr=1e-2, embedding_lr=4e-2, **formats), 3)
    for name, change in mixed.items():
        expected = faster if name.startswith(("wte.", "wpe.")) else whole
        assert torch.allclose(change, expected[name], rtol=1e-5, atol=1e-7), name


def test_what_decays() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    config = small("qwen3", tied="false", weight_decay=0.1, decay_embeddings=False)
    for name, parameter, decay in (
        ("embed_tokens.weight[0:4]", matrix, 0.0),
        ("lm_head.weight", matrix, 0.1),
        ("layers.0.mlp.up_proj.weight", matrix, 0.1),
        ("norm.weight", vector, 0.0),
    ):
        assert group_of(name, parameter, config).weight_decay == decay, name
    assert group_of("embed_tokens.weight", matrix, small("qwen3", weight_decay=0.1)).weight_decay == 0.1
    # A matrix of a block has the rate itself, too.
    assert group_of("layers.0.mlp.up_proj.weight", matrix, small("qwen3", **NAMED)) == (1.0, 0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_begin_at_zero_and_nothing_else_changes(family: str) -> None:
    usual, zero = (model_of(small(family, zero_projections=value)) for value in (False, True))
    ends = FAMILIES[family].projections
    of_zero = dict(zero.named_parameters())
    for name, parameter in usual.named_parameters():
        if name.endswith(ends):
            assert parameter.count_nonzero() and not of_zero[name].count_nonzero(), name
        else:
            assert torch.equal(parameter, of_zero[name]), name
    # Two for each block, and they learn.
    assert sum(name.endswith(ends) for name in of_zero) == 2 * SMALL["layers"]
    tokens = torch.arange(32).view(2, 16)
    zero.loss_sum(tokens, tokens).backward()
    assert all(
        p.grad.count_nonzero() for name, p in of_zero.items() if name.endswith(ends) and p.grad is not None
    )


def test_settings_that_say_nothing_new_leave_a_digest_as_it_was(corpus: Corpus, tmp_path: Path) -> None:
    config = resolve("gpt2-nano")
    assert config.digest() == "b8551bc54787bb276dc7b63b53c920faf0ec7c1e6794dd433d56e948e2c7d23c"
    for name, value in LATER.items():
        other = not value if isinstance(value, bool) else 7 if isinstance(value, int) else 1e-3
        if name != "head_lr":
            assert replace(config, **{name: other}).digest() != config.digest(), name
    done = {"config_digest": config.digest(), "corpus": corpus.fingerprint, "step": 7}
    (tmp_path / "done.json").write_text(json.dumps(done))
    assert steps_done(tmp_path, config, corpus) == 7


@pytest.mark.parametrize("preset", ["qwen3-125m", "qwen3-350m", "qwen3-1b"])
def test_the_presets_are_what_the_recipe_gives(preset: str) -> None:
    made = resolve(preset)
    tokens = 20 * parameter_count(made)
    wanted = asdict(recipe(made.d_model, tokens))
    assert {name: getattr(made, name) for name in wanted} == wanted
    assert made.global_batch_tokens in (2**19, 2**20)
    assert 0 <= made.steps * made.global_batch_tokens - tokens < made.global_batch_tokens
    assert (made.optimizer, made.schedule, made.decay_ratio, made.min_lr_ratio) == ("muon", "wsd", 0.65, 0)
    assert made.zero_projections and not made.decay_embeddings
    # Who says the step in another way means that.
    other = resolve(preset, {"gradient_accumulation_steps": 3})
    assert other.shares(2) == [3 * made.batch_size] * 2


def cards(name: str = "3060", count: int = 5) -> auto.Cards:
    gpu = gpus.find(name)
    return auto.Cards(gpu, 0.95 * gpu.memory, count, nodes=count)


@pytest.mark.parametrize(
    ("hours", "name", "count", "preset"),
    [
        (1, "3060", 5, "qwen3-125m"),  # too little for any
        (24, "3060", 5, "qwen3-125m"),
        (24 * 7, "3060", 1, "qwen3-125m"),
        (24 * 7, "3060", 5, "qwen3-350m"),
        (24 * 90, "3060", 5, "qwen3-1b"),
        (24, "4090", 5, "qwen3-350m"),
        (24 * 7, "4090", 5, "qwen3-1b"),
    ],
)
def test_the_largest_preset_that_gets_enough_tokens_in_the_hours(
    hours: float, name: str, count: int, preset: str
) -> None:
    there = cards(name, count)
    choice = auto.choose_for(hours, there, {"strategy": "auto"}, None)
    assert choice.preset == preset, choice.reason
    made = resolve(preset, choice.with_these({"strategy": "auto"}))
    assert made.steps == pytest.approx(auto.steps_in(hours, made, there), rel=0.05)
    is_fed = made.steps * made.global_batch_tokens >= 19 * parameter_count(made)
    assert is_fed == (hours > 1)
    assert f"in {hours:g} hours {count} x RTX {name}" in choice.reason


def test_little_text_is_a_small_model(corpus: Corpus) -> None:
    """Four passes over it, and no more."""
    text = replace(corpus, tokens={"train": 30_000_000, "validation": 1000}, vocab_size=2000)
    choice = auto.choose_for(24 * 14, cards(), {}, text)
    made = resolve(choice.preset, choice.with_these({}))
    assert made.vocab_size == 2000 and choice.preset == "qwen3-125m"
    assert 0.9 * 4 * 30e6 < made.steps * made.global_batch_tokens <= 4 * 30e6
    assert "is read 4 times" in choice.reason


def test_what_fits_no_card_is_not_taken() -> None:
    assert auto.choose_for(24 * 365, replace(cards(), available=4e9), {}, None).preset == "qwen3-125m"
    with pytest.raises(ConfigError, match="no room for the smallest model"):
        auto.choose_for(24, replace(cards(), available=1e8), {}, None)


def test_what_is_said_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epochs, steps are given too"):
        auto.choose_for(24, cards(), {"steps": "7", "epochs": "2"}, None)
    with pytest.raises(ConfigError, match="this is preset=gpt2"):
        auto.resolve_here("gpt2", {}, tmp_path, tmp_path, print, hours=3)


def test_aura_plan_chooses_for_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--preset auto --hours 24 --gpu 3060 --nodes 5 --json".split()
    assert plan_command.main(words) == 0
    said = capsys.readouterr()
    made, choice = json.loads(said.out), auto.choose_for(24, cards(), {"strategy": "auto"}, None)
    assert (made["preset"], made["steps"]) == (choice.preset, choice.settings["steps"])
    assert made["seconds"] == pytest.approx(24 * 3600, rel=0.02)
    assert f"preset=auto: qwen3-125m with steps={made['steps']}" in said.err


def test_aura_plan_of_this_machine_counts_what_is_free_and_goes_on_with_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a launch asks it."""
    monkeypatch.setattr(gpus, "of_this_machine", lambda say: [gpus.Found("RTX 3060", 12 * 2**30, 5 * 2**30)])
    words = f"--preset auto --nodes 5 --json --run-dir {tmp_path} --set strategy=auto".split()
    assert plan_command.main([*words, "--hours", "24"]) == 0
    said = json.loads(capsys.readouterr().out)["auto"]
    made = resolve(said["preset"], said["settings"])
    choice = auto.choose_for(24, replace(cards(), available=0.95 * 5 * 2**30), {"strategy": "auto"}, None)
    assert made == resolve(choice.preset, choice.with_these({"strategy": "auto"}))
    # Runs that begun when sizes were made to measure go on with them, too.
    made = replace(made, layers=10, d_model=512, heads=8, lr=1e-3)
    (tmp_path / "config.json").write_text(json.dumps(asdict(made)))
    assert plan_command.main([*words, "--hours", "1"]) == 0
    answer = capsys.readouterr()
    again = json.loads(answer.out)["auto"]
    assert resolve(again["preset"], again["settings"]) == made and "as this run has begun" in answer.err


def test_aura_train_goes_on_with_the_size_it_has_begun_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Corpus
) -> None:
    """Whatever is free at the second start."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    free = 11 * 2**30
    monkeypatch.setattr(gpus, "of_this_machine", lambda say: [gpus.Found("RTX 3060", 12 * 2**30, free)])
    first = auto.resolve_here("auto", {}, corpus.path, tmp_path, print, hours=24)
    assert first.vocab_size == corpus.vocab_size and first.family == "qwen3"
    (tmp_path / "config.json").write_text(json.dumps(asdict(first)))
    free = 2**30
    assert auto.resolve_here("auto", {}, corpus.path, tmp_path, print, hours=2) == first
