"""The benchmarks measure what they say: the reference loop learns exactly what ours does."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest
import reference_loop
import to_loss
import torch
import wire
from aura.config import from_values, resolve
from aura.corpus.corpus import Corpus
from aura.model.gpt import GPT
from aura.plan.flops import flops_per_token
from aura.plan.gpus import find
from aura.plan.memory import wire_bytes
from aura.plan.plan import plan_for
from measuring import interval, part_until, student
from ranks import LOOPBACK
from trainers import complete, start
from waits import Gpu, Model, moved_bytes
from wire_arms import CARDS, GROUPS, Arm, arms, lengths, scaled


def test_the_reference_loops_learn_what_ours_does(corpus: Corpus, tmp_path: Path) -> None:
    """From our initial weights, with our batches and groups of decay: nanoGPT's, and GPT-2 of transformers with AdamW
    of torch."""
    settings = "--gradient-accumulation-steps 2 --vocab-multiple 1 --weight-decay 2 --clip 0.5 --lr 1e-2"
    (ours,) = complete(start(tmp_path, corpus, 1, settings))
    config = from_values(json.loads((ours.run_dir / "config.json").read_text()))
    for kind in ("nanogpt", "paired"):
        theirs = reference_loop.train(config, corpus.path, config.steps, kind=kind)
        assert len(theirs["losses"]) == ours.done["step"]
        assert theirs["losses"][-1] == pytest.approx(ours.done["loss"], abs=1e-5), kind
    assert theirs["validation_loss"] == pytest.approx(ours.done["validation_loss"], abs=1e-5)


def test_the_interval_is_that_of_student_s_t() -> None:
    assert (student(2), student(15)) == pytest.approx((4.303, 2.13145), abs=1e-4)
    # Mean 0, standard deviation sqrt(16 * 0.035 / 15), 16 of them
    half = 2.13145 * (0.56 / 15) ** 0.5 / 4
    assert interval((0.1, -0.3, 0.2, 0.0) * 4) == pytest.approx((-half, half), abs=1e-4)


def test_without_a_gpu_the_gpu_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == gpu.NO_GPU
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "needs an NVIDIA GPU" in output.err and not output.out


@pytest.mark.more
def test_two_models_are_trained_to_the_loss_of_one(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"to_loss.py --corpus {corpus.path} --tokens 24000 --presets gpt2-nano qwen3-nano"
    monkeypatch.setattr(sys, "argv", words.split())
    assert to_loss.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    losses = {float(part): loss for part, loss in found["losses"].items()}
    target = losses.pop(1.0)
    # Qwen3 learns faster: it has been better with less.
    assert losses[0.15] > losses[0.25] > losses[0.4] and losses[0.4] < target
    assert found["tokens"] == pytest.approx(part_until(target, losses), nan_ok=True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA GeForce RTX 3090", 71.16288e12), ("X", None)],
)
def test_mfu_is_relative_to_the_peak_in_the_plan_s_table(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name=name, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    config = resolve("gpt2")
    found = gpu.mfu(1e5, config)
    assert found == (peak and pytest.approx(1e5 * flops_per_token(config) / peak))


# Very small tensors, and cards that are forty times as fast as they are
TINY = ["--scale=4096", "--mfu=20", "--warm-up=1", "--steps=2"]


@pytest.mark.parametrize(
    "arm",
    [
        Arm("RTX 4090", "int4", 0.9, nodes=2),
        Arm("RTX 4090", "int4", 1.0, nodes=2, encoded_beforehand=True),
        Arm("RTX 4090", "bf16", nodes=2, rival="DDP"),
    ],
    ids=str,
)
def test_the_benchmark_of_the_wire_runs_over_loopback(arm: Arm) -> None:
    """The strategies do all that they do elsewhere; nothing is quicker than the waits, and bytes are those planned."""
    given = wire.parser().parse_args(TINY)
    row = wire.measure(arm, [LOOPBACK] * 2, given)
    assert row and row.equal and len(row.seconds) == 2
    assert statistics.mean(row.seconds) > 0.9 * lengths(arm, given.mfu).of_a_step
    assert row.waits.tokens == 510 * 1024
    if arm.delay:  # a step ends when all of it has been sent
        config = scaled(arm.config(), given.scale)
        assert row.sent == pytest.approx(given.scale * 2 * wire_bytes(config) / 2, rel=0.03)


def test_the_waits_are_as_long_as_the_plan_says() -> None:
    for arm in arms(GROUPS):
        waits, card = lengths(arm), find(arm.card)
        alone = plan_for(arm.config(), 1, card) if not arm.slow else None
        assert alone is None or waits.alone == pytest.approx(alone.compute_seconds)
        planned = plan_for(arm.config(), arm.nodes, card)
        assert sum(waits.micro_batches[0]) + waits.update[0] == pytest.approx(planned.compute_seconds)
        assert planned.memory.total < planned.device_memory
        assert waits.tokens == planned.tokens_per_step == (163_840 if arm.local_steps else 522_240)
    assert lengths(Arm("RTX 4090", "int4")).ceiling == pytest.approx(5)
    assert 4 < lengths(Arm("RTX 4090", "int4", slow=True)).ceiling < 4.25


def test_a_model_of_waits_has_the_parameters_and_makes_their_gradients_in_order() -> None:
    config, gpu = scaled(resolve("gpt2-medium"), 4096), Gpu()
    model = Model(config, gpu)
    model.fill(0)
    shapes = {name: parameter.shape for name, parameter in GPT(config, "meta").named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert sum(layer.part for layer in model.layers) + model.output.part == pytest.approx(1)
    there: list[tuple[str, float]] = []

    def note(name: str) -> None:
        there.append((name, time.perf_counter()))

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
    gpu.micro_batch = 0.3
    began = gpu.free_at = time.perf_counter()
    model().backward()
    layers = [name.rpartition(".")[0] for name, _ in there]
    assert list(dict.fromkeys(layers)) == list(
        dict.fromkeys(name.rpartition(".")[0] for name in reversed(shapes))
    )
    first, last = there[0][1] - began, there[-1][1] - began
    assert 0.1 < first < last and last >= 0.299
    assert all(
        parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr()
        for layer in model.layers
        for parameter, gradient in zip(layer.parameters(), layer.gradients, strict=True)
    ), "a copy that no GPU would make"


def test_a_gpu_goes_on_while_the_processor_is_late() -> None:
    gpu = Gpu()
    began = gpu.free_at
    gpu.work(0.05)
    time.sleep(0.1)  # encodes
    gpu.work(0.1)
    assert 0.15 <= time.perf_counter() - began < 0.2
    assert time.perf_counter() - gpu.free_at < 0.05
    time.sleep(0.05)
    gpu.work_now(0.05)  # on what came now
    assert gpu.free_at - began >= 0.25
    gpu.nothing_before(began + 1)
    assert gpu.free_at == began + 1


def test_the_codec_moves_at_least_what_it_reads_and_writes() -> None:
    assert moved_bytes("bf16", 5) < moved_bytes("int4", 5) - 1.2 * 4.5 - 2 * 4.5


def row(arm: Arm, seconds: float) -> wire.Row:
    return wire.Row(arm, [seconds] * 3, lengths(arm), 0, None, 0.1, True)


def test_the_last_line_is_of_one_setting() -> None:
    fast, slow = CARDS
    rows = [
        row(Arm(fast, "int4", 0.5), 3.1),  # not measured on the other card
        row(Arm(fast, "int4", 0.75), 3.2),
        row(Arm(fast, "int4", 1.0), 4.0),
        row(Arm(fast, "int4", 1.0, encoded_beforehand=True), 3.0),
        row(Arm(fast, "int4", 1.0, link=2500), 3.0),
        *(row(Arm(slow, "int4", delay), 25.0) for delay in (0.75, 1.0)),
        row(Arm(slow, "int4", 1.0, encoded_beforehand=True), 25.0),
    ]
    assert wire.last_line(rows) == {
        "bench": "wire",
        "setting": "int4, 0.75 of a step late",
        "speedup_4090": pytest.approx(15.427 / 3.2, abs=1e-3),
        "speedup_3060": pytest.approx(125.025 / 25, abs=1e-3),
        "evidence": "cpu",
    }
    assert wire.last_line([])["setting"] is None


def test_what_the_processor_limits_is_not_compared() -> None:
    limited = replace(row(Arm("RTX 4090", "bf16", rival="DDP"), 3.0), load=0.21)
    assert "not comparable" in limited.notes(True) and not row(limited.arm, 3.0).notes(True)
    slow = replace(row(Arm("RTX 4090", "int4", link=100), 3.0), goodput=80.0)
    assert "not full" in slow.notes(True) and not slow.notes(False)
