"""Number formats and numbers that are not finite, in real trainer processes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once, and not in every rank that computes blocks again
from aura.corpus.corpus import Corpus
from aura.model.gpt import GPT
from aura.model.hrm_text import HrmText
from aura.optim import gradient_sum
from aura.run import memory_dry_run
from aura.run import trainer as train
from trainers import Fault, after_each_step, complete, curve, infinite_gradient, start, stopped_and_resumed


def test_the_smallest_formats_learn_and_resume_exactly(corpus: Corpus, tmp_path: Path) -> None:
    """What is drawn for the rounding of moments, and of sums of gradients, follows from the position in the data."""
    settings = "--precision bf16 --parameter-format bf16 --moment-format int8 --gradient-checkpointing "
    settings += "--loss-chunk 20 --vocab-multiple 64 --steps 8 --lr 2e-2 --gradient-accumulation-steps 4 "
    settings += "--validation-windows 2"
    straight, _ = stopped_and_resumed(tmp_path, corpus, 2, settings, 4)
    assert straight.done["validation_loss"] < straight.done["first_validation_loss"] - 0.1
    # Rounded to nearest it would be another run.
    nearest = complete(start(tmp_path / "c", corpus, 2, settings, dict.fromkeys(range(2), round_to_nearest)))
    assert curve(nearest[0]) != curve(straight)
    assert curve(nearest[0]) == pytest.approx(curve(straight), abs=0.2)


def round_to_nearest() -> None:
    gradient_sum.GradientSum._hook = lambda *_: lambda gradient: None  # type: ignore[method-assign]


def run_memory_dry_run() -> None:
    """As on a card."""
    memory_dry_run.is_bounded = lambda device: True  # type: ignore[assignment]
    original, compute, passes = train.run_memory_dry_run, memory_dry_run.forward_and_backward, 0

    def once_more(*arguments: Any) -> None:
        nonlocal passes
        passes += 1
        compute(*arguments)

    def watched(*arguments: Any) -> None:
        before = torch.get_rng_state()
        original(*arguments)
        assert torch.equal(torch.get_rng_state(), before) and passes == 2

    memory_dry_run.forward_and_backward, train.run_memory_dry_run = once_more, watched


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rehearsal_changes_no_bit(ranks: int, corpus: Corpus, tmp_path: Path) -> None:
    settings = "--precision bf16 --parameter-format bf16 --dropout 0.2 --steps 3 "
    settings += "--gradient-accumulation-steps 2"
    faults = dict.fromkeys(range(ranks), run_memory_dry_run)
    plain, *_ = complete(start(tmp_path / "plain", corpus, ranks, settings))
    rehearsed, *_ = complete(start(tmp_path / "rehearsed", corpus, ranks, settings, faults))
    assert plain.files("checkpoint-step-3") == rehearsed.files("checkpoint-step-3")


def test_deterministic_kernels_are_torchs_and_change_no_bit_on_a_processor(
    corpus: Corpus, tmp_path: Path
) -> None:
    def watch() -> None:
        begin = train.Trainer.train

        def watched(self: train.Trainer) -> bool:
            assert torch.are_deterministic_algorithms_enabled() == self.config.deterministic
            return begin(self)

        train.Trainer.train = watched  # type: ignore[method-assign]

    one, other = (
        complete(start(tmp_path / kind, corpus, 1, f"--steps 3 --deterministic {kind}", {0: watch}))[0]
        for kind in ("false", "true")
    )
    assert one.files("checkpoint-step-3") == other.files("checkpoint-step-3")


def infinite_loss() -> None:
    original, calls = GPT.loss_sum, 0

    def loss_sum(self: GPT, *arguments: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += self.training
        return original(self, *arguments) * (math.nan if calls == 8 else 1)

    GPT.loss_sum = loss_sum  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("what", "fault", "settings"),
    [
        ("loss", infinite_loss, ""),
        ("gradient", infinite_gradient(8), ""),
        ("gradient", infinite_gradient(8), "--strategy rounds --local-steps 4"),
    ],
    ids=["loss", "gradient", "in a round"],
)
def test_what_is_not_finite_names_its_rank_and_stops_before_the_optimizer_step(
    what: str, fault: Fault, settings: str, corpus: Corpus, tmp_path: Path
) -> None:
    for trainer in start(tmp_path, corpus, 2, settings, faults={1: fault}):
        assert trainer.end() == 65, trainer.text
        assert f"The {what} is not finite at step 8 on rank 1 on node1." in trainer.text
        assert trainer.checkpoints() == ["checkpoint-step-5"]
        assert trainer.status["state"] == "failed"


def test_fp16_leaves_out_a_step_that_overflows_on_one_rank(corpus: Corpus, tmp_path: Path) -> None:
    settings = "--precision fp16 --save-every 1 --keep-checkpoints 9 --steps 5 --validation-windows 2"
    ranks = complete(start(tmp_path, corpus, 2, settings, faults={1: infinite_gradient(4)}))
    said = "Step 4: gradient not finite at scale 2048; the step is left out, the scale is now 1024."
    assert said in ranks[0].text
    for trainer in ranks:
        models = [trainer.files(f"checkpoint-step-{step}")[0] for step in (2, 3, 4, 5)]
        assert models[0] != models[1] == models[2] != models[3]
        assert trainer.state("checkpoint-step-4")["scaler"]["scale"] == 1024
    assert ranks[0].files("checkpoint-step-5") == ranks[1].files("checkpoint-step-5")


def test_a_run_may_go_on_in_another_precision(corpus: Corpus, tmp_path: Path) -> None:
    for steps, precision in ((2, "fp32"), (4, "fp16"), (6, "bf16")):
        settings = f"--steps {steps} --precision {precision} --validation-windows 2"
        (trainer,) = complete(start(tmp_path, corpus, 1, settings))
    assert "precision fp16 -> bf16" in trainer.text
    # Of the epoch that is under way, whenever the run was asked to be longer.
    assert trainer.state("checkpoint-step-6")["progress"]["epoch_tokens"] == 6 * 2 * 16


def test_fp16_keeps_its_scale_and_dropout_its_numbers_across_a_resume(corpus: Corpus, tmp_path: Path) -> None:
    settings = "--precision fp16 --dropout 0.2 --optimizer muon --lr 2e-2 --validation-windows 2"
    (straight,) = stopped_and_resumed(tmp_path, corpus, 1, settings, 8)
    assert "Precision: fp16 | Autocast=ON | GradScaler=ON" in straight.text
    there = tmp_path.glob("*/node0/run/checkpoints/checkpoint-step-20/state.json")
    scales = [json.loads(path.read_text())["scaler"] for path in there]
    assert len(scales) == 2 and scales[0] == scales[1]
    assert straight.done["validation_loss"] < straight.done["first_validation_loss"] - 0.3


@pytest.mark.parametrize(
    ("settings", "instead", "refusal"),
    [
        ("--optimizer muon --lr 2e-2", "--lr 2e-2", "has optimizer=muon, this run asks for adamw"),
        ("--family hrm-text --layers 2 --lr 5e-3", "--layers 2 --lr 5e-3",
         "has family=hrm-text, this run asks for gpt2"),
        ("--family qwen3 --kv-heads 1 --optimizer muon", "--family qwen3 --optimizer muon",
         "has kv_heads=1, this run asks for 0"),
    ],
    ids=["muon", "hrm-text", "qwen3"],
)  # fmt: skip
def test_two_ranks_learn_as_one_and_a_resume_changes_no_bit(
    settings: str, instead: str, refusal: str, corpus: Corpus, tmp_path: Path
) -> None:
    """HRM-Text is stopped while its embedding gets no gradient; its two processors do not draw the same numbers."""

    def draw_others() -> None:
        original = HrmText._initialise
        HrmText._initialise = lambda self, config: (original(self, config), self.z_L_init.neg_())  # type: ignore

    first, second = stopped_and_resumed(tmp_path, corpus, 2, settings, 2, {1: draw_others})
    assert first.done["validation_loss"] < first.done["first_validation_loss"] - 0.3
    for line in (
        "World size: 2 | GPUs in all: 0 | Backend: gloo",
        "Batch size per rank: 2 | Gradient accumulation steps: 1 | Effective batch size: 4",
        "Total training steps: 20 | Steps per epoch: ",
    ):
        assert line in first.text and line not in second.text
    (one,) = complete(start(tmp_path / "one", corpus, 1, f"{settings} --batch-size 4"))
    assert one.done["validation_loss"] == pytest.approx(first.done["validation_loss"], abs=1e-4)
    (refused, _) = start(tmp_path / "stopped", corpus, 2, instead)
    assert refused.end() == 64
    assert refusal in refused.text


def test_what_is_dropped_depends_on_the_window_and_not_on_who_computes_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Tolerance: 1e-4 nats at each of 8 steps, as without dropout. A gradient is weighted by tokens."""
    settings = "--dropout 0.2 --steps 8 --lr 1e-2 --validation-windows 2"
    (alone,) = complete(start(tmp_path / "alone", corpus, 1, f"{settings} --batch-size 6"))
    for name, ranks, more in (
        ("three", 3, ""),
        ("spread", 1, "--batch-size 3 --gradient-accumulation-steps 2"),
        ("unequal", 2, "--rank-batch-sizes 5,1"),
    ):
        first, *_ = complete(start(tmp_path / name, corpus, ranks, f"{settings} {more}"))
        assert curve(first) == pytest.approx(curve(alone), abs=1e-4), name
        assert first.done["validation_loss"] == pytest.approx(alone.done["validation_loss"], abs=1e-4), name
    # 0.2 of the activations are enough to be seen.
    (without,) = complete(start(tmp_path / "without", corpus, 1, f"{settings} --dropout 0 --batch-size 6"))
    assert curve(without) != pytest.approx(curve(alone), abs=1e-3)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_learns_the_same(corpus: Corpus, tmp_path: Path) -> None:
    """With everything that changes what is compiled. Tolerance: 1e-3 nats at each of 6 steps."""
    settings = "--steps 6 --gradient-checkpointing --loss-chunk 20 --vocab-multiple 64 --validation-windows 4"
    (eager,) = complete(start(tmp_path / "eager", corpus, 1, settings))
    (compiled,) = start(tmp_path / "compiled", corpus, 1, f"{settings} --compile true")
    assert compiled.end(seconds=480) == 0, compiled.text
    assert curve(compiled) == pytest.approx(curve(eager), abs=1e-3)
    assert f"torch.compile: on; compiled kernels stay in {compiled.run_dir}/compiled." in compiled.text
    assert "torch.compile: off (compile=false)." in eager.text

    # A restart finds what has been compiled.
    def count() -> None:
        from torch._dynamo.utils import counters

        (tmp_path / "counted").write_text(json.dumps(counters["inductor"]))

    settings += " --compile true --steps 8"
    (again,) = start(tmp_path / "compiled", corpus, 1, settings, {0: after_each_step(count)})
    assert again.end(seconds=480) == 0, again.text
    assert f"compiled kernels stay in {again.run_dir}/compiled." in again.text
    counted = json.loads((tmp_path / "counted").read_text())
    # Not of all: torch may cut the same model into a forward and a backward graph in another way (seen once).
    assert counted.get("fxgraph_cache_hit", 0) > 0, counted
