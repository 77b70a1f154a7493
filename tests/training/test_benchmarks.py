"""The benchmarks measure what they say: the reference loop learns exactly what ours does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu
import paired_seeds
import pytest
import reference_loop
import torch
import transformers_loop
from aura.config import from_values, resolve
from aura.corpus.corpus import Corpus
from aura.plan.flops import flops_per_token
from trainers import complete, start


def test_the_reference_loop_sees_the_same_batches_and_makes_the_same_steps(
    corpus: Corpus, tmp_path: Path
) -> None:
    settings = "--gradient-accumulation-steps 2 --vocab-multiple 1 --clip 0.5"
    (ours,) = complete(start(tmp_path, corpus, 1, settings))
    config = from_values(json.loads((ours.run_dir / "config.json").read_text()))
    losses = reference_loop.train(config, corpus.path, config.steps)["losses"]
    assert len(losses) == ours.done["step"]
    assert losses[-1] == pytest.approx(ours.done["loss"], abs=1e-5)


def test_the_two_of_a_pair_learn_the_same(corpus: Corpus, tmp_path: Path) -> None:
    """From our initial weights, with our groups of decay: AdamW of torch, GPT-2 of transformers."""
    (ours,) = complete(start(tmp_path, corpus, 1, "--weight-decay 2 --clip 0.5 --lr 1e-2 --vocab-multiple 1"))
    config = from_values(json.loads((ours.run_dir / "config.json").read_text()))
    theirs = transformers_loop.train(config, corpus.path, paired=True)
    assert theirs["validation_loss"] == pytest.approx(ours.done["validation_loss"], abs=1e-5)


def test_the_interval_is_that_of_student_s_t() -> None:
    assert paired_seeds.student(15) == pytest.approx(2.13145, abs=1e-4)
    rows = [{"ours": 4.0 + difference, "transformers": 4.0} for difference in (0.1, -0.3, 0.2, 0.0) * 4]
    found = paired_seeds.summary(rows)
    # The differences: mean 0, standard deviation sqrt(16 * 0.035 / 15), 16 of them
    half = 2.13145 * (0.56 / 15) ** 0.5 / 4
    assert found["interval"] == pytest.approx([-half, half], abs=1e-4)
    assert (found["pairs"], found["largest"]) == (16, pytest.approx(-0.3))


def test_without_a_gpu_the_gpu_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == gpu.NO_GPU
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "needs an NVIDIA GPU" in output.err and not output.out


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("X", None),
    ],
)
def test_mfu_is_relative_to_the_peak_in_the_plan_s_table(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name=name, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    config = resolve("gpt2")
    found = gpu.mfu(1e5, config)
    assert found == (peak and pytest.approx(1e5 * flops_per_token(config) / peak))


def test_the_cpu_benchmark_explains_itself() -> None:
    program = Path(gpu.__file__).with_name("cpu.py")
    environment = os.environ | {"PYTHONPATH": str(program.parent.parent / "training")}
    done = subprocess.run(
        [sys.executable, program, "--help"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "bench-results/cpu.json" in done.stdout
