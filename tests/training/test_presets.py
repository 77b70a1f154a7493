"""Presets, `auto` and `manual`."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from aura import config
from aura.commands import cli
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.families.family import mlp_width
from aura.model.family import model_of
from aura.plan import auto, gpus
from aura.plan.memory import memory_of
from aura.plan.shapes import parameter_count
from nvidia import driver, no_driver, raises

COUNTS = {
    "gpt2-nano": 675_328,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-medium-10gb": 354_823_168,
    "gpt2-medium-6gb": 354_823_168,
    "gpt2-medium-4gb": 354_823_168,
    "aura-72h-extended": 1_315_723_264,
    "aura-72h-max": 2_494_200_320,
    "hrm-text-100m": 108_238_080,
    "hrm-text-1b": 1_013_173_248,
    "qwen3-nano": 754_432,
    "qwen3-125m": 126_701_824,
    "qwen3-350m": 344_597_760,
    "qwen3-1b": 983_281_152,
}

MIB = 2**20


@dataclass(frozen=True)
class Card:
    """What NVIDIA's driver tells of a GPU; None: it says "not supported". Memory in MiB."""

    name: str
    total: int | None
    free: int
    uuid: str
    capability: tuple[int, int] | None = (8, 6)


TWO_GPUS = (
    Card("NVIDIA GeForce RTX 3060", 12288, 6000, "GPU-a"),
    Card("NVIDIA GeForce RTX 3090", 24576, 24100, "GPU-b"),
)


def cards_are(monkeypatch: pytest.MonkeyPatch, *cards: Card) -> None:
    """On the bus in this order."""

    def told(value: Any) -> Any:
        return raises(pynvml.NVMLError_NotSupported)() if value is None else value

    driver(
        monkeypatch,
        len(cards),
        Name=lambda index: cards[index].name,
        UUID=lambda index: cards[index].uuid,
        MemoryInfo=lambda i: SimpleNamespace(total=told(cards[i].total) * MIB, free=cards[i].free * MIB),
        CudaComputeCapability=lambda index: told(cards[index].capability),
    )


def header(preset: str) -> str:
    text = resources.files("aura").joinpath("presets", f"{preset}.toml").read_text(encoding="utf-8")
    return " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))


def test_there_is_a_count_for_every_preset() -> None:
    assert config.preset_names() == sorted(COUNTS)


@pytest.mark.parametrize("preset", COUNTS)
def test_the_parameters_of_a_preset(preset: str) -> None:
    """As documented, by the formula of the plan, and in the real model."""
    made, model = resolve(preset), model_of(resolve(preset), "meta")
    assert parameter_count(made) == model.parameter_count() == COUNTS[preset]
    assert preset.endswith("-nano") or f"({COUNTS[preset]:,}" in header(preset)


@pytest.mark.parametrize(("preset", "batch"), [("hrm-text-100m", (64, 2)), ("hrm-text-1b", (24, 4))])
def test_hrm_text_has_the_batches_of_guide_002_and_fits_its_cards(
    preset: str, batch: tuple[int, int]
) -> None:
    made = resolve(preset)
    assert (made.batch_size, made.gradient_accumulation_steps, made.precision) == (*batch, "bf16")
    assert sum(made.shares(8)) == batch[0] * batch[1] * 8
    assert memory_of(made, made.batch_size, on_gpu=True, ranks=8).total < 80e9


@pytest.mark.parametrize(("preset", "gigabytes"), [("qwen3-125m", 6), ("qwen3-350m", 10), ("qwen3-1b", 24)])
def test_qwen3_has_a_form_that_llama_cpp_quantizes_and_fits_its_cards(preset: str, gigabytes: int) -> None:
    made = resolve(preset)
    assert (made.d_model // made.heads, made.d_model % 256, mlp_width(made) % 256) == (64, 0, 0)
    alone_too = (1, 5) if preset == "qwen3-1b" else (5,)
    for ranks in alone_too:
        assert memory_of(made, made.batch_size, on_gpu=True, ranks=ranks).total < 0.92 * gigabytes * 1e9


@pytest.mark.parametrize(
    ("preset", "settings", "rate"),
    [
        ("gpt2", {"optimizer": "muon"}, 4.5e-3),
        ("gpt2-medium", {"optimizer": "MUON"}, 3.9e-3),
        ("gpt2-nano", {"optimizer": "muon"}, 1.1e-2),
        ("qwen3-125m", {"optimizer": "adamw"}, 6e-4),
        # What the preset says, and what a person says, stays
        ("gpt2", {"optimizer": "muon", "learning-rate": "1e-3"}, 1e-3),
        ("gpt2", {"optimizer": "adamw"}, 6e-4),
        ("gpt2-nano", {}, 2e-3),
        ("qwen3-350m", {"optimizer": "muon"}, 3.9e-3),
    ],
)
def test_another_optimizer_takes_its_own_rate(preset: str, settings: dict[str, str], rate: float) -> None:
    assert resolve(preset, settings).lr == rate


def test_aura_72h_max_is_what_guide_004_asks_for() -> None:
    made = resolve("aura-72h-max")
    assert (made.layers, made.d_model, made.seq_len) == (30, 2560, 2048)
    assert (made.batch_size, made.gradient_accumulation_steps, made.lr) == (2, 16, 2e-4)
    assert (made.warmup_steps, made.warmup_ratio, made.save_every) == (0, 0.03, 500)
    assert made.gradient_checkpointing
    assert made.seq_len * sum(made.shares(1)) == 65_536
    assert memory_of(made, made.batch_size, on_gpu=True).total < 80e9


@pytest.mark.parametrize("gigabytes", [10, 6, 4])
def test_the_low_memory_recipes_train_the_same_and_fit(gigabytes: int) -> None:
    medium, low = resolve("gpt2-medium"), resolve(f"gpt2-medium-{gigabytes}gb")
    assert low.shares(5) == medium.shares(5)
    same = "layers heads d_model seq_len vocab_size steps lr weight_decay warmup_steps".split()
    assert [getattr(low, name) for name in same] == [getattr(medium, name) for name in same]
    # With room for a desktop and for the gaps of the allocator.
    assert memory_of(low, low.batch_size, on_gpu=True).total < 0.92 * gigabytes * 1e9


def test_manual_takes_the_size_from_nowhere_else() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("manual", {"layers": 2, "embed_size": 64})
    assert "--heads/--num-heads, --seq-len/--seq-length missing" in str(caught.value)
    made = resolve("manual", {"layers": 2, "embed_size": 64, "heads": 2, "seq_len": 32})
    assert made.preset == "manual"
    assert config.from_values(json.loads(json.dumps(vars(made)))) == made


def gpu(name: str, free_gib: float) -> gpus.Found:
    return gpus.Found(name, int(free_gib * 1.1 * 2**30), int(free_gib * 2**30))


@pytest.mark.parametrize(
    ("free_gib", "preset"),
    [
        (79.0, "aura-72h-max"),
        (39.0, "aura-72h-extended"),
        (23.3, "gpt2-medium"),
        (11.5, "gpt2-medium"),
        (8.1, "gpt2-medium-10gb"),
        (5.6, "gpt2-medium-6gb"),
        (3.6, "gpt2-medium-4gb"),
        (1.9, "gpt2"),
        (0.9, "gpt2-nano"),
    ],
)
def test_auto_takes_the_largest_that_fits_the_best_gpu(free_gib: float, preset: str) -> None:
    choice = auto.choose([gpu("small", 0.5), gpu("large", free_gib)], {})
    assert choice.preset == preset
    assert f"large has {free_gib} GiB free" in choice.reason
    if preset in auto.CANDIDATES:
        made = resolve(preset, choice.settings)
        assert memory_of(made, made.batch_size, on_gpu=True).total < free_gib * 2**30
        assert made.shares(1) == resolve(preset).shares(1)


def test_auto_counts_with_the_other_settings() -> None:
    choice = auto.choose([gpu("x", 5.6)], {"batch_size": 64, "gradient_checkpointing": "false"})
    assert choice.preset == "gpt2-nano", "what was given is not changed to make it fit"


@pytest.mark.parametrize(
    ("free_gib", "preset", "settings"),
    [
        (39.0, "aura-72h-extended", {"precision": "fp16"}),
        (11.5, "gpt2-medium", {}),
        (5.6, "gpt2-medium-6gb", {"precision": "fp16"}),
    ],
)
def test_auto_asks_no_bf16_of_a_card_that_has_none(
    free_gib: float, preset: str, settings: dict[str, str]
) -> None:
    turing = replace(gpu("old", free_gib), capability=(7, 5))
    choice = auto.choose([turing], {})
    assert (choice.preset, choice.settings) == (preset, settings)
    assert ("and no bf16" in choice.reason) and ("precision=fp16" in choice.reason) == bool(settings)
    for less in (3.6, 2.6, 1.9, 1.5, 1.1):
        choice = auto.choose([replace(turing, free=int(less * 2**30))], {})
        made = resolve(choice.preset, choice.settings)
        assert "bf16" not in (made.precision, made.parameter_format), choice


def test_bf16_on_a_card_without_it_is_refused_with_what_to_give_instead() -> None:
    check = gpus.check_number_format
    with pytest.raises(ConfigError, match=r"RTX 2070 has compute capability 7\.5 .*: .* --precision fp16\."):
        check(resolve("gpt2"), (7, 5), "RTX 2070")
    with pytest.raises(ConfigError, match="--precision fp16 --parameter-format fp32, which needs more mem"):
        check(resolve("gpt2-medium-4gb"), (7, 0), "V100")
    resolve("gpt2-medium-4gb", {"precision": "fp16", "parameter_format": "fp32"})  # what the sentence says
    check(resolve("gpt2"), (8, 0), "A100")
    check(resolve("gpt2-medium"), (7, 5), "RTX 2070")


def test_auto_takes_the_vocabulary_of_the_corpus_where_it_is_larger(corpus: Corpus) -> None:
    large, small = replace(corpus, vocab_size=16384), replace(corpus, vocab_size=300)
    choice = auto.choose([], {}, large)
    assert (choice.preset, choice.settings) == ("gpt2-nano", {"vocab_size": 16384})
    assert "gpt2-nano with vocab_size=16384, because this machine has no GPU" in choice.reason
    assert auto.choose([], {"vocab_size": "20000"}, large).settings == {}
    assert auto.choose([], {}, small).settings == {}
    assert auto.choose([gpu("x", 11.5)], {}, large).settings == {}
    larger = replace(corpus, vocab_size=60000)
    assert auto.choose([gpu("x", 11.5)], {}, larger).settings == {"vocab_size": 60000}


def test_a_run_of_auto_goes_on_with_what_it_has_begun_with(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command, in the same directory, though another program has taken the memory meanwhile."""
    from aura.run import attempt

    def run(made: config.TrainConfig, corpus_dir: Path, run_dir: Path, *_: Any, **__: Any) -> int:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(asdict(made)))
        begun.append((made, run_dir))
        return 0

    begun: list[tuple[config.TrainConfig, Path]] = []
    monkeypatch.setattr(attempt, "run", run)
    monkeypatch.chdir(tmp_path)
    words = ["train", "--preset", "auto", "--corpus", str(corpus.path)]
    for free in (2000, 20000, 300):
        cards_are(monkeypatch, replace(TWO_GPUS[1], free=free))
        assert cli.main(words) == 0
    assert begun[0] == begun[1] == begun[2]
    assert begun[0][0].preset == "gpt2"
    assert begun[0][0].batch_size < resolve("gpt2").batch_size
    assert begun[0][1] == Path("runs/auto")
    assert "preset=auto: gpt2, as this run has begun (runs/auto/config.json)." in capsys.readouterr().out

    assert cli.main([*words, "--lr", "1e-5"]) == 0
    assert begun[3][0] == replace(begun[0][0], lr=1e-5)
    Path("runs/auto/config.json").write_text("{")
    assert cli.main(words) == 64
    assert "runs/auto/config.json is damaged" in capsys.readouterr().err


def resolve_here(folder: Path) -> config.TrainConfig:
    return auto.resolve_here("auto", {}, folder / "corpus", folder / "run", print)


def test_auto_asks_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards_are(monkeypatch, *TWO_GPUS)
    assert resolve_here(tmp_path).preset == "gpt2-medium"
    assert "NVIDIA GeForce RTX 3090 has 23.5 GiB free" in capsys.readouterr().out

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert resolve_here(tmp_path).preset == "gpt2-medium-6gb"

    no_driver(monkeypatch, pynvml.NVMLError_DriverNotLoaded)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match=r"NVIDIA's driver says: Driver Not Loaded\. Repair it"):
        resolve_here(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # the way out
    assert resolve_here(tmp_path).preset == "gpt2-nano"


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a1", "GPU-a2", "GPU-b"]),
        ("2,0", ["GPU-b", "GPU-a1"]),
        ("GPU-b", ["GPU-b"]),
        ("GPU-a2, 0", ["GPU-a2", "GPU-a1"]),
        ("GPU-a", []),  # two begin so
        ("2,7,0", ["GPU-b"]),  # CUDA reads up to the first that is none
        ("2,-1", ["GPU-b"]),
        ("", []),
        ("-1", []),
        (" -1, 2", []),
    ],
)
def test_what_cuda_does_not_show_does_not_count(
    visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards_are(monkeypatch, *(replace(TWO_GPUS[0], uuid=uuid) for uuid in ("GPU-a1", "GPU-a2", "GPU-b")))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in gpus.of_this_machine(print)] == uuids


def test_what_the_driver_may_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cards_are(
        monkeypatch,
        Card("NVIDIA GB10", None, 0, "GPU-a", (12, 1)),
        Card("NVIDIA X", 1024, 1000, "GPU-b", None),
        Card("NVIDIA GeForce RTX 2070", 8192, 8000, "GPU-c", (7, 5)),
    )
    assert gpus.of_this_machine(said.append) == [
        gpus.Found("NVIDIA X", 2**30, 1000 * MIB, "GPU-b"),
        gpus.Found("NVIDIA GeForce RTX 2070", 2**33, 8000 * MIB, "GPU-c", (7, 5)),
    ]
    assert said == ["A GPU is not counted, because the driver does not tell its memory: NVIDIA GB10"]


def test_without_a_gpu_a_driver_or_its_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cards_are(monkeypatch)
    assert gpus.of_this_machine(print) == []
    no_driver(monkeypatch)
    assert gpus.of_this_machine(print) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # a controller
    assert gpus.of_this_machine(print) == []


def test_a_single_process_sees_the_gpu_with_most_free_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards_are(monkeypatch, *TWO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that it is as before after the test
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("WORLD_SIZE", "2")
    auto.take_best_gpu(print)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1", "each rank of a process group has its own GPU"
    monkeypatch.delenv("WORLD_SIZE")
    auto.take_best_gpu(print)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "torch counts the cards as the driver does"
    assert "RTX 3090: of 2 GPUs the one with most free memory" in capsys.readouterr().out

    # Who only asks a model leaves a card to whoever has most of it, unless it is named.
    idle = Card("NVIDIA GeForce RTX 3050", 8192, 8000, "GPU-c")
    busy = replace(TWO_GPUS[1], free=10_000)
    for cards, taken in (((busy, idle), "GPU-c"), ((busy, TWO_GPUS[0]), ""), ((busy,), "")):
        cards_are(monkeypatch, *cards)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        auto.take_best_gpu(print, beside_others=True)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == taken
        said = "so somebody works on it, and this takes the processor" in capsys.readouterr().out
        assert said == (not taken)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    auto.take_best_gpu(print, beside_others=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"

    no_driver(monkeypatch, pynvml.NVMLError_DriverNotLoaded)
    auto.take_best_gpu(print)  # training itself says what is wrong, if anything is
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"


def test_auto_is_refused_where_ranks_could_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="aura plan --preset auto"):
        resolve_here(tmp_path)
    with pytest.raises(ConfigError, match="several ranks could decide differently"):
        resolve("auto")


def test_every_preset_says_what_it_is_for() -> None:
    for preset in [*config.preset_names(), "manual"]:
        assert re.match(r"[A-Z].{60,}", header(preset)), preset
