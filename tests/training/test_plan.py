"""`aura plan`: figures that others have published or that follow by hand, the table of GPUs, what is printed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aura.commands import cli
from aura.config import preset_names, resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.plan import gpus, plan
from aura.plan.flops import flops_per_token, recomputed_flops_per_token
from aura.plan.memory import memory_of, owned_bytes, wire_bytes
from aura.plan.shapes import shape_of
from aura.plan.units import in_bytes, in_seconds
from conftest import Aura

A100 = gpus.find("A100 80GB")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_flops_per_token_as_nanogpt_counts_them() -> None:
    gigaflops = {"gpt2": 0.855, "gpt2-medium": 2.42, "aura-72h-extended": 9.07, "aura-72h-max": 16.8}
    counted = {preset: flops_per_token(resolve(preset)) / 1e9 for preset in gigaflops}
    assert counted == pytest.approx(gigaflops, rel=0.002)


def test_computing_blocks_again_costs_one_more_forward_pass_of_them() -> None:
    config = resolve("aura-72h-max")
    output_matrix = 2 * config.vocab_size * config.d_model
    forward = flops_per_token(config) / 3 - output_matrix
    assert recomputed_flops_per_token(config) == pytest.approx(forward, rel=1e-3)
    assert recomputed_flops_per_token(resolve("gpt2")) == 0, "the loss computes nothing twice"
    kept = replace(config, gradient_checkpointing=False)
    again, once = plan.plan_for(config, 1, A100), plan.plan_for(kept, 1, A100)
    assert again.compute_seconds and once.compute_seconds
    more = 1 + recomputed_flops_per_token(config) / flops_per_token(config)
    assert again.compute_seconds / once.compute_seconds == pytest.approx(more)


def test_a_measured_mfu_has_what_is_computed_twice_in_it() -> None:
    """So that what the live line shows, given back as --mfu, predicts what was measured."""
    for changes in ({}, {"gradient_checkpointing": True}):
        config = resolve("gpt2", changes)
        made = plan.plan_for(config, 1, A100, mfu=0.3)
        assert made.seconds_per_step and made.peak_flops
        shown = made.tokens_per_step / made.seconds_per_step * flops_per_token(config) / made.peak_flops
        assert shown == pytest.approx(0.3)


def test_the_traffic_of_a_ring_over_a_gigabit_switch() -> None:
    """Five hosts, gpt2-medium, fp32: 19.3 s; bf16: half; the padded rows travel too."""
    made = plan.plan_for(resolve("gpt2-medium"), 5, A100)
    assert made.communication_seconds == pytest.approx(19.3, rel=0.005)
    half = resolve("gpt2-medium", {"precision": "bf16", "parameter_format": "bf16"})
    assert plan.plan_for(half, 5, A100).communication_seconds == pytest.approx(9.7, rel=0.005)
    fast = plan.plan_for(half, 5, A100, link_mbit=10_000)
    assert fast.communication_seconds == pytest.approx(0.97, rel=0.005)
    for alone in (plan.plan_for(half, 1, A100), plan.plan_for(half, 8, A100, nodes=1)):
        assert alone.communication_seconds == alone.communication_bytes == 0


@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_the_ranks_of_a_node_send_what_one_would(wire: str) -> None:
    config = resolve("gpt2-medium", {"wire": wire})
    all_bytes = wire_bytes(config)

    def sent(ranks: int, nodes: int) -> float:
        return plan.plan_for(config, ranks, A100, nodes=nodes).communication_bytes / all_bytes

    assert sent(10, 5) == pytest.approx(sent(5, 5)) == pytest.approx(2 * 4 / 5)
    assert sent(4, 2) == pytest.approx(sent(3, 2)) == pytest.approx(1)
    # 2 + 2 + 1 + 1 + 1: of the gradients 5/7; the 2/7 of the weights that it owns to four others
    assert sent(7, 5) == pytest.approx(5 / 7 + 4 * 2 / 7)
    assert sent(4, 1) == 0


def test_time_follows_from_work_and_speed() -> None:
    config = resolve("gpt2", {"loss_chunk": 0})
    made = plan.plan_for(config, 1, A100, mfu=0.5, hours=24)
    tokens_per_second = 312e12 * 0.5 / flops_per_token(config)
    assert made.seconds_per_step == pytest.approx(made.tokens_per_step / tokens_per_second)
    assert made.tokens == pytest.approx(24 * 3600 * tokens_per_second, rel=1e-3)
    assert made.seconds == pytest.approx(24 * 3600, rel=1e-3)
    eager = plan.plan_for(replace(config, compile="false"), 1, A100)
    compiled = plan.plan_for(config, 1, A100)
    assert eager.seconds_per_step and compiled.seconds_per_step
    assert eager.seconds_per_step / compiled.seconds_per_step == pytest.approx(1.85)


def test_the_rank_with_the_largest_micro_batch_decides() -> None:
    unequal = resolve("gpt2", {"rank_batch_sizes": "8,4,4,2,2", "gradient_accumulation_steps": 3})
    made = plan.plan_for(unequal, 5, A100)
    assert made.sequences_per_step == 60
    assert made.tokens_per_step == 60 * 1024
    assert made.memory == memory_of(unequal, 8, on_gpu=True, ranks=5)
    equal = replace(unequal, rank_batch_sizes="")
    assert made.compute_seconds == plan.plan_for(equal, 5, A100).compute_seconds
    with pytest.raises(ConfigError, match="has 5 numbers, but 4 ranks"):
        plan.plan_for(unequal, 4, A100)


def test_every_rank_is_counted_with_its_own_gpu() -> None:
    """A laptop as rank 0 has a small micro-batch: the large one of another GPU need not fit it."""
    laptop, card = gpus.find("RTX 3050 Laptop"), gpus.find("RTX 3060")
    config = resolve("gpt2-medium-4gb", {"rank_batch_sizes": "2,48,4"})
    devices = [laptop, card, replace(card, memory=6 * 2**30)]
    made = plan.plan_for(config, 3, devices)
    assert not [note for note in made.notes if "fit" in note]
    assert made.device == "1 x RTX 3050 Laptop, 2 x RTX 3060"
    assert made.fullest_rank is not None
    assert made.memory == memory_of(config, (2, 48, 4)[made.fullest_rank], on_gpu=True, ranks=3)
    assert made.peak_flops_of_all == sum(device.peak["bf16"] for device in devices)
    times = [
        plan.plan_for(replace(config, rank_batch_sizes="", batch_size=size), 1, device).compute_seconds
        for size, device in zip((2, 48, 4), devices, strict=True)
    ]
    assert made.compute_seconds == max(time or 0 for time in times)

    swapped = plan.plan_for(config, 3, [card, laptop, card])
    (note,) = [note for note in swapped.notes if "fit" in note]
    assert note.startswith("Rank 1 (RTX 3050 Laptop): it does not fit 4.00 GiB")
    assert "memory of rank 1: " in "\n".join(swapped.lines())
    unknown = plan.plan_for(config, 3, [card, gpus.called("NVIDIA Unheard 1", 2**34), card])
    assert unknown.compute_seconds is unknown.peak_flops_of_all is None
    assert any("The speed of NVIDIA Unheard 1 is not known" in note for note in unknown.notes)


def test_ranks_on_one_cpu_share_it() -> None:
    processor = replace(A100, is_gpu=False)
    alone, four = (plan.plan_for(resolve("gpt2-nano"), ranks, processor, nodes=1) for ranks in (1, 4))
    assert alone.compute_seconds and four.compute_seconds == pytest.approx(4 * alone.compute_seconds)
    assert four.device_memory == alone.device_memory / 4
    assert alone.memory.context == 0
    assert any("other programs on it" in sentence for sentence in alone.assumptions)


def test_what_does_not_fit_comes_with_settings_that_do() -> None:
    laptop = gpus.find("RTX 3050 Laptop")
    made = plan.plan_for(resolve("gpt2-medium"), 1, laptop)
    (note,) = [note for note in made.notes if "does not fit" in note]
    words = dict(word.rstrip(".").split("=") for word in note.split("This would: ")[1].split())
    smaller = plan.plan_for(resolve("gpt2-medium", words), 1, laptop)
    assert not [note for note in smaller.notes if "does not fit" in note]
    assert smaller.tokens_per_step == made.tokens_per_step


def test_a_link_that_is_too_slow_says_what_fewer_bits_would_do() -> None:
    config = resolve("gpt2-medium")
    seconds = plan.plan_for(replace(config, wire="int4"), 5, A100).communication_seconds
    assert any(f"with wire=int4 {seconds:.3g} s" in note for note in plan.plan_for(config, 5, A100).notes)
    coded = plan.plan_for(replace(config, wire="int4"), 5, A100)
    assert not any("wire=int4" in note for note in coded.notes)
    assert not any("wire=int4" in note for note in plan.plan_for(config, 5, A100, link_mbit=10**6).notes)


def test_too_few_tokens_are_called_so() -> None:
    few = plan.plan_for(resolve("aura-72h-max"), 1, A100, hours=72)
    assert any("far below 20" in note for note in few.notes)
    assert few.tokens / few.parameters < 1
    enough = plan.plan_for(resolve("gpt2", {"steps": 10**6}), 1, A100)
    assert not any("far below" in note for note in enough.notes)


def test_predicted_against_measured() -> None:
    made = plan.plan_for(resolve("gpt2", {"loss_chunk": 0}), 1, A100)
    assert made.seconds_per_step is not None
    words = plan.compare(made, made.seconds_per_step * 1.25, made.memory.tensors * 9 // 10, steps=17)
    assert "(+25%) over 17 steps, without the first ones" in words and "(-10%)" in words
    assert "of tensors" not in plan.compare(made, 1.0, None, steps=17)
    unknown = plan.plan_for(resolve("gpt2"), 1, gpus.called("NVIDIA Unheard 1", 2**34))
    assert unknown.seconds_per_step is None
    words = plan.compare(unknown, 2.0, None, steps=2, warmed_up=False)
    assert "measured 2 s over 2 steps, the slow first ones among them" in words


def test_the_components_add_up() -> None:
    for preset in preset_names():
        made = plan.plan_for(resolve(preset), 1, A100).as_json()["memory"]
        parts = [value for name, value in made.items() if name not in ("total", "moment")]
        assert sum(parts) == made["total"]


def test_main_memory_is_planned_too() -> None:
    """A process, both directions of a leg, and the weights that late micro-batches saw."""
    late = {"strategy": "sharded", "wire": "int8", "delay": 0.5}
    made = plan.plan_for(resolve("qwen3-1b", late), 5, gpus.find("3090"))
    d = shape_of(resolve("qwen3-1b")).stored
    assert made.host_bytes == pytest.approx(2 * 2**30 + 2 * d * 129 / 128 + 4 * d, rel=1e-3)
    assert made.save_bytes == made.checkpoint_bytes + math.ceil(owned_bytes(resolve("qwen3-1b", late), 5) / 5)
    two = plan.plan_for(resolve("qwen3-1b", late), 10, gpus.find("3090"), nodes=5)
    assert two.host_bytes == 2 * made.host_bytes
    assert plan.plan_for(resolve("qwen3-1b"), 1, gpus.find("3090")).host_bytes == 2 * 2**30
    assert "main memory of a PC: 7.5" in "\n".join(made.lines())


def test_a_death_costs_half_the_way_between_two_copies_and_never_more_than_between_two_checkpoints() -> None:
    made = plan.plan_for(resolve("gpt2-medium"), 5, gpus.called("NVIDIA GeForce RTX 4090", 24 * 2**30))
    assert made.lost_seconds and made.seconds_per_step
    disks, copies = made.lost_seconds
    assert disks == 100 * made.seconds_per_step
    # 2.27 of its 2.84 GB come from the others, in a quarter of the time.
    assert copies == pytest.approx(4 * 2.27e9 / 117.5e6 / 2, rel=0.01)
    often = resolve("gpt2-medium", {"save_every": 1})
    never, seldom = plan.plan_for(often, 5, A100).lost_seconds or (0, 1)
    assert never == seldom


def test_the_json_keeps_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(capsys, "--preset", "gpt2", "--gpu", "rtx-3090", "--nodes", "2", "--ranks-per-node", "3")
    assert set(answer) == set(
        "schema preset device device_memory fullest_rank peak_flops peak_flops_of_all utilisation nodes ranks "
        "link_mbit parameters memory sequences_per_step tokens_per_step flops_per_token compute_seconds "
        "communication_bytes communication_seconds exposed_seconds seconds_per_step checkpoint_bytes "
        "host_bytes save_bytes "
        "checkpoints_on_disk save_every copies_apart collecting_seconds steps passes tokens seconds "
        "tokens_per_parameter assumptions notes candidates chosen".split()
    )
    assert set(answer["memory"]) == set(
        "parameters gradients moments weight_copies activations logits workspace delay context moment total".split()
    )
    assert (answer["schema"], answer["device"], answer["ranks"]) == ("aura-plan-1", "RTX 3090", 6)
    assert answer["seconds"] == answer["steps"] * answer["seconds_per_step"]


def test_the_length_of_the_run(capsys: pytest.CaptureFixture[str], corpus: Corpus) -> None:
    nano = ["--preset", "gpt2-nano", "--gpu", "3060"]
    assert run(capsys, *nano, "--set", "steps=7")["steps"] == 7
    assert run(capsys, *nano, "--tokens", "1e6")["steps"] == 1954  # of 512 tokens
    assert run(capsys, *nano, "--hours", "1")["seconds"] == pytest.approx(3600, rel=0.01)
    words = [*nano, "--corpus", str(corpus.path)]
    answer = run(capsys, *words, "--epochs", "3")
    assert answer["tokens"] == pytest.approx(3 * corpus.tokens["train"], abs=512)
    assert answer["passes"] == pytest.approx(3, abs=0.1)
    answer = run(capsys, *words)
    assert answer["steps"] == resolve("gpt2-nano").steps, "as aura train would do"
    assert answer["passes"] == pytest.approx(answer["tokens"] / corpus.tokens["train"])
    answer = run(capsys, *words, "--tokens", "1e6")
    assert answer["passes"] == pytest.approx(1e6 / corpus.tokens["train"], rel=0.01)


def test_the_aliases_work_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model-preset manual --num_layers 12 --embed-size 768 --gpu h100".split()
    assert run(capsys, *words, "--set", "num_heads=12", "seq_length=1024")["parameters"] == 124_439_808


@pytest.mark.parametrize(
    ("name", "gib", "meant", "multiprocessors"),
    [
        ("3060", 12, "RTX 3060", 28),
        ("rtx_3090", 24, "RTX 3090", 82),
        ("3060ti", 8, "RTX 3060 Ti", 38),
        ("NVIDIA GeForce RTX 4060 Ti", 8, "RTX 4060 Ti", 34),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", 4, "RTX 3050 Laptop", 16),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", 6, "RTX 3050 6GB Laptop", 20),
        ("NVIDIA GeForce RTX 3050 4GB Laptop GPU", 4, "RTX 3050 4GB Laptop", 20),
        ("NVIDIA GeForce RTX 3050Ti Laptop GPU", 4, "RTX 3050 Ti Laptop", 20),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 6, "RTX 3060 Laptop", 30),
        ("NVIDIA GeForce RTX 4090 D", 24, "RTX 4090 D", 114),
        ("NVIDIA GeForce RTX 5090 D v2", 24, "RTX 5090 D V2", 170),
        ("NVIDIA GeForce RTX 2080 Ti", 11, "RTX 2080 Ti", 68),
        ("NVIDIA GeForce RTX 2070 Super with Max-Q Design", 8, "RTX 2070 SUPER with Max-Q Design", 40),
        ("NVIDIA GeForce GTX 1660 Ti", 6, "GTX 1660 Ti", 24),
        ("NVIDIA GeForce GTX 1650 with Max-Q Design", 4, "GTX 1650 with Max-Q Design", 16),
        ("NVIDIA GeForce GTX 1060 6GB", 6, "GTX 1060 6GB", 10),
        ("NVIDIA GeForce GTX 960M", 4, "GTX 960M", 5),
        ("NVIDIA GeForce GTX TITAN X", 12, "GTX TITAN X", 24),
        ("NVIDIA TITAN X (Pascal)", 12, "TITAN X (Pascal)", 28),
        ("NVIDIA GeForce MX450", 2, "MX450", 14),
        # Of one name several cards: by the memory that the driver tells
        ("NVIDIA GeForce RTX 3050", 6, "RTX 3050 6GB", 18),
        ("NVIDIA GeForce RTX 3080", 12, "RTX 3080 12GB", 70),
        ("NVIDIA GeForce RTX 2060", 12, "RTX 2060 12GB", 34),
        ("NVIDIA GeForce GTX 1060", 6, "GTX 1060 6GB", 10),
        ("NVIDIA A100-SXM4-80GB", 80, "A100 80GB", 0),
        ("NVIDIA A100-PCIE-40GB", 40, "A100 40GB PCIe", 0),
        ("NVIDIA H100 80GB HBM3", 80, "H100 80GB", 0),
    ],
)
def test_a_gpu_by_what_people_and_drivers_call_it(
    name: str, gib: int, meant: str, multiprocessors: int
) -> None:
    found = gpus.called(name, 0.98 * gib * 2**30)  # the driver keeps some of it
    assert found.name == meant
    assert not multiprocessors or found.source.startswith(f"{multiprocessors} SM, ")


OTHERS = "NVIDIA GeForce RTX 9999|NVIDIA RTX A2000|RTX 3060 Super|NVIDIA H100 NVL|nvidia|"


@pytest.mark.parametrize("name", OTHERS.split("|"))
def test_a_relative_of_a_gpu_is_another_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match="give --peak-tflops and --memory-gb"):
        gpus.find(name)


def test_the_table_of_gpus_is_sound() -> None:
    for gpu in gpus.GPUS:
        assert gpus.find(gpu.name) == gpu == gpus.called(f"NVIDIA GeForce {gpu.name} GPU", gpu.memory)
        assert gpu.peak["fp16"] >= gpu.peak["fp32"] > 4e11
        assert gpu.peak.get("bf16", gpu.peak["fp16"]) == gpu.peak["fp16"]
        assert 0.3 <= gpu.mfu <= 0.6
        assert gpu.source


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [  # TFLOP/s: the architecture papers' own, GTX 16 and older without tensor cores
        ("RTX 3090", 71, 35.6),
        ("RTX 4090", 165.2, 82.6),
        ("RTX 5090", 209.5, 104.8),
        ("RTX 2080 Ti", 53.8, 13.4),
        ("GTX 1660 Ti", 5.4, 5.4),
        ("GTX 1080 Ti", 11.3, 11.3),
        ("GTX 980", 5.0, 5.0),
    ],
)
def test_the_peaks_that_the_papers_name(name: str, half: float, single: float) -> None:
    found = gpus.find(name)
    assert found.peak["fp16"] / 1e12 == pytest.approx(half, rel=0.01)
    assert found.peak["fp32"] / 1e12 == pytest.approx(single, rel=0.01)
    assert found.has_bf16 == (name[:6] in ("RTX 30", "RTX 40", "RTX 50"))


def test_a_card_without_bf16_hears_of_fp16(aura_says: Aura) -> None:
    words = ["plan", "--gpu", "NVIDIA GeForce RTX 2080 Ti"]
    said = aura_says(*words, "--preset", "gpt2")
    assert "RTX 2080 Ti cannot compute in bf16: train with --precision fp16." in said
    assert "TFLOP/s in fp16" in aura_says(*words, "--preset", "auto")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "RTX 9999"], "GPU 'RTX 9999' is not in the table"),
        (["--gpu", "GTX 1060"], "GTX 1060 3GB, GTX 1060 5GB, GTX 1060 6GB"),
        (["--gpu", "A100"], "A100 40GB, A100 80GB"),
        (["--peak-tflops", "30"], "belong together"),
        (["--gpu", "3060", "--epochs", "3"], "epochs=3 are passes over a corpus: name it with --corpus"),
        (["--gpu", "3060", "--link", "x"], "invalid number value: 'x'"),
        (["--gpu", "3060", "--tokens", "1", "--hours", "1"], "--hours is not allowed with --tokens"),
        (["--gpu", "3060", "--set", "steps=9", "--hours", "1"], "--hours is not allowed with --steps"),
        (["--gpu", "3060", "--corpus", "nowhere"], "There is no corpus in nowhere"),
        (
            "--corpus {corpus} --gpu 3060 --preset gpt2-nano --vocab-size 299".split(),
            "has a vocabulary of 300, but preset 'gpt2-nano' has only vocab_size=299",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], message: str, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main(
            ["plan", "--preset", "gpt2", *(word.format(corpus=corpus.path) for word in words)]
        )
    except SystemExit as ended:
        code = ended.code
    answer = capsys.readouterr()
    assert code in (64, 65)
    assert answer.out == ""
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_a_controller_without_torch_can_plan(tmp_path: Path) -> None:
    """Only the standard library."""
    for name in ("torch", "numpy", "rich"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    training = Path(plan.__file__).parents[2]
    environment = {"PYTHONPATH": f"{tmp_path}:{training}", "AURA_LANG": "en"}
    for device in ("4090", "cpu"):
        words = [sys.executable, "-m", "aura", "plan", "--preset", "auto", "--gpu", device, "--nodes", "5"]
        answer = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        name = "gpt2-medium" if device == "4090" else "gpt2-nano"
        assert answer.stderr.startswith(f"preset=auto: {name}, because")
        for words_of_line in ("memory of a rank", "effective batch", "communication", "tokens per parameter"):
            assert words_of_line in answer.stdout


def test_the_lines_for_the_launch_say_everything() -> None:
    lines = plan.plan_for(resolve("gpt2-medium"), 5, gpus.find("3060")).lines()
    text = "\n".join(lines)
    assert "354,823,168 parameters" in text
    assert "160 sequences = 163,840 tokens" in text
    assert sum(line.startswith("Assumed: ") for line in lines) == 4
    assert any(line.startswith("Note: ") for line in lines)


def test_a_step_of_an_hour_and_a_terabyte_are_figures_that_can_be_read() -> None:
    seconds = {0.0933: "0.0933 s", 999.4: "999 s", 999.6: "1,000 s", 3012.0: "3,012 s"}
    assert {value: in_seconds(value) for value in seconds} == seconds
    assert [in_bytes(value) for value in (8.1e6, 4.26e9, 1.7e12)] == ["8.1 MB", "4.26 GB", "1,700 GB"]
