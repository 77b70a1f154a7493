"""Every preset on the null card: what that proves, and what not, says presets.py."""

from __future__ import annotations

import pytest
from presets import CARDS, GIB, NullCard, installed

pytestmark = pytest.mark.more
KINDS = {"eager": "false", "compiled": "true"}
SMALL = 96 * 2**20  # the workspaces of cuBLAS, and what torch.compile tries out: 84 MB beside qwen3-nano


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> NullCard:
    card = NullCard(installed(), tmp_path_factory.mktemp("null-card"))
    card.build()
    return card


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", CARDS)
def test_a_preset_needs_what_the_plan_says_and_fits_its_card(card: NullCard, preset: str, kind: str) -> None:
    row = card.row(preset, CARDS[preset], "--compile", KINDS[kind])
    assert row["peak"] == pytest.approx(row["plan"], rel=0.05, abs=SMALL)
    assert (row["waits"], row["copies_to_host"]) == (1, 1)
    assert row["graph_breaks"] == 0 and row["graphs"] <= (4 if kind == "compiled" else 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("preset", "gib"), [("gpt2-medium", 12), ("gpt2", 24), ("qwen3-350m", 24)])
def test_a_filled_card_is_as_full_as_the_plan_says(
    card: NullCard, preset: str, gib: float, kind: str
) -> None:
    """At its worst: beside the gradients of a micro-batch before."""
    step = ("--micro-batch", "auto", "--gradient-accumulation-steps", "96", "--batch-size", "1")
    row = card.row(preset, gib, "--compile", KINDS[kind], *step, "--loss-chunk", "1024")
    assert row["batch"] > 1 and row["reserved"] < 0.85 * gib * GIB
    assert row["peak"] == pytest.approx(row["plan"], rel=0.05)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["qwen3-125m", "hrm-text-100m"])
def test_a_model_in_bf16_needs_what_the_plan_says(card: NullCard, preset: str, kind: str) -> None:
    formats = "--precision bf16 --parameter-format bf16 --optimizer adamw --moment-format int8 --batch-size 4"
    row = card.row(preset, 80, *formats.split(), "--global-batch-tokens", "0", "--compile", KINDS[kind])
    assert row["peak"] == pytest.approx(row["plan"], rel=0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay", ["0", "0.5"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
def test_two_ranks_do_their_steps_and_wait_for_the_card_a_few_times(
    card: NullCard, wire: str, delay: str
) -> None:
    settings = ("--compile", "false", "--optimizer", "muon", "--wire", wire, "--delay", delay)
    for row in card.rows_of_two("gpt2-nano", 4, *settings):
        assert row["peak"] == pytest.approx(row["plan"], rel=0.05, abs=SMALL)
        assert row["waits_of_computing"] == (0 if float(delay) else 2)
        assert row["waits"] <= 16 and row["copies_to_host"] <= 8


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_beside_the_next_step_needs_what_the_plan_says(card: NullCard, kind: str) -> None:
    """At its worst: from the second of four micro-batches on there are gradients too."""
    micro_batches = ("--gradient-accumulation-steps", "4", "--global-batch-tokens", "0")
    settings = ("--compile", KINDS[kind], "--wire", "int4", "--delay", "0.5")
    for row in card.rows_of_two("qwen3-125m", 8, *settings, *micro_batches):
        assert row["peak"] == pytest.approx(row["plan"], rel=0.05)
        assert (row["waits_of_computing"], row["graph_breaks"]) == (0, 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay", ["0", "0.5"])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_need_what_the_plan_says(card: NullCard, kind: str, delay: str) -> None:
    rounds = ("--strategy", "rounds", "--local-steps", "2", "--wire", "int4", "--delay", delay)
    for row in card.rows_of_two("qwen3-125m", 8, "--compile", KINDS[kind], *rounds):
        assert row["peak"] == pytest.approx(row["plan"], rel=0.05)
        assert row["graph_breaks"] == 0


@pytest.mark.timeout(300)
def test_a_run_measures_what_suits_it_and_comes_to_its_end(card: NullCard) -> None:
    settings = ("--compile", "auto", "--optimizer", "muon", "--strategy", "auto")
    for rank, run in enumerate(card.runs_of_two("gpt2-nano", 4, *settings)):
        assert run.returncode == 0, run.stderr[-2000:]
        if rank == 0:
            assert "strategy=auto: wire=" in run.stdout
            assert "MiB of tensors, measured" in run.stdout and "Training completed" in run.stdout


def test_what_does_not_fit_is_said_before_the_first_step_with_what_would(card: NullCard) -> None:
    refused = card.step("gpt2-medium-10gb", 6, "--compile", "false", last=1)
    assert refused.returncode == 64
    assert "Out of memory on rank 0" in refused.stdout and "Step 1/" not in refused.stdout
    way_out = refused.stdout.split("of the memory with ")[-1].split(" and another")[0].split()
    card.row("gpt2-medium-10gb", 6, "--compile", "false", *way_out)


def test_deterministic_kernels_refuse_no_operation(card: NullCard) -> None:
    card.row("gpt2", 12, "--compile", "false", "--deterministic", "true")
    card.row("hrm-text-100m", 80, "--compile", "false", "--deterministic", "true")
    smallest = card.row(
        "gpt2-medium-4gb", 4, "--compile", "false", "--deterministic", "true", "--layers", "2"
    )
    assert smallest["waits"] == 1
