from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from aura import config
from aura.commands import cli
from aura.errors import EXIT_USAGE, ConfigError
from aura.optim.schedule import warmup_steps
from aura.run import attempt
from conftest import BOUND, Aura

TRAINING = Path(config.__file__).parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(TRAINING), "PATH": "/usr/bin:/bin", "AURA_LANG": "en"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )


def test_gpt2_medium_is_what_guide_000_runs() -> None:
    medium = config.resolve("gpt2-medium")
    assert (medium.layers, medium.heads, medium.d_model, medium.seq_len) == (24, 16, 1024, 1024)
    assert (medium.batch_size, medium.gradient_accumulation_steps, medium.precision) == (1, 32, "fp16")
    assert (medium.lr, medium.weight_decay, medium.vocab_size) == (2e-4, 0.01, 50257)
    assert sum(medium.shares(5)) == 160


TWICE = "both say how long the run is: give only one"
AUTO, MUON, HRM = {"strategy": "auto"}, {"optimizer": "muon"}, {"family": "hrm-text"}
QWEN = {"family": "qwen3"}
AUTO_CHOOSES = "strategy=auto chooses wire and delay itself, and this is "
MUON_NEEDS = "optimizer=muon needs parameter_format=fp32 and moment_format"


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("gpt2-medum", {}, ["'gpt2-medum'", "Did you mean 'gpt2-medium'?", "gpt2-nano"]),
        ("gpt2-nano", {"stepps": "3"}, ["'stepps'", "Did you mean 'steps'?", "weight_decay"]),
        ("gpt2-nano", {"preset": "x"}, ["Unknown preset 'x'"]),
        ("gpt2-nano", {"steps": "many"}, ["steps='many'", "whole number"]),
        ("gpt2-nano", {"steps": 2.0}, ["whole number"]),
        ("gpt2-nano", {"steps": True}, ["whole number"]),
        ("gpt2-nano", {"steps": "0"}, ["steps=0", "at least 1"]),
        ("gpt2-nano", {"lr": "nan"}, ["lr='nan'", "number"]),
        ("gpt2-nano", {"lr": "0"}, ["lr=0.0", "more than 0"]),
        ("gpt2-nano", {"beta2": "1"}, ["beta2=1.0", "less than 1"]),
        ("gpt2-nano", {"min_lr_ratio": "1.5"}, ["at most 1"]),
        ("gpt2-nano", {"precision": "bf61"}, ["'bf61'", "Did you mean 'bf16'?", "fp32"]),
        ("gpt2-nano", {"heads": "3"}, ["d_model=128", "heads=3"]),
        ("gpt2-nano", {"strategy": "shard"}, ["strategy='shard' is unknown", "'sharded'", "sharded, rounds, auto"]),
        ("gpt2-nano", {"compile": "yes"}, ["compile='yes' is unknown", "auto, true, false"]),
        ("gpt2-nano", {"strategy": True}, ["strategy=True is not a word"]),
        ("gpt2-nano", {"wire": "fp16"}, ["wire='fp16' is unknown", "fp32, bf16"]),
        ("gpt2", {"lr": 1e-3, "learning-rate": 2e-3}, ["lr and learning-rate are the same setting"]),
        ("gpt2", {"global_batch_tokens": 1500}, ["=1500 is no multiple of seq_len=1024: 2048 is."]),
        ("gpt2", {"global_batch_tokens": -1024}, ["global_batch_tokens=-1024 must be at least 0"]),
        ("gpt2", {"tokens": "2.5"}, ["tokens='2.5' is not a whole number"]),
        ("gpt2", {"tokens": "1.5e0"}, ["tokens='1.5e0' is not a whole number"]),
        ("gpt2", {"tokens": "1e9", "steps": "5"}, [f"tokens and steps {TWICE}"]),
        ("gpt2", {"tokens": 5, "epochs": 2}, [f"tokens and epochs {TWICE}"]),
        ("gpt2", {"steps": 5, "epochs": 2}, [f"epochs and steps {TWICE}"]),
        ("gpt2", {"global_batch_tokens": 2048, "gradient-accumulation-steps": 2},
         [ "global_batch_tokens and gradient_accumulation_steps both say how much one optimizer step takes" ]),
        ("gpt2", {"seed": 2**64}, ["seed=18446744073709551616 must be at most 18446744073709551615"]),
        ("gpt2", {"d_model": 99999999996}, ["d_model=99999999996 must be at most 1000000"]),
        ("gpt2", {"balance": "speed"}, ["balance=speed divides a step of fixed size", "=0"]),
        ("gpt2-nano", AUTO | {"wire": "int4"}, [f"{AUTO_CHOOSES}wire=int4 and delay=0"]),
        ("gpt2-nano", AUTO | MUON | {"delay": 0.5}, [f"{AUTO_CHOOSES}wire=fp32 and delay=0.5: leave both out"]),
        ("gpt2-nano", {"delay": 0.5, "optimizer": "adamw"}, ["a delay ruins what AdamW learns"]),
        ("gpt2-nano", MUON | {"precision": "bf16", "parameter_format": "bf16"}, [MUON_NEEDS]),
        ("gpt2-nano", MUON | {"moment_format": "int8"}, [MUON_NEEDS]),
        ("gpt2-nano", HRM | {"layers": 3}, ["layers=3 cannot be divided between the two stacks"]),
        ("gpt2-nano", HRM | {"d_model": 60, "heads": 4}, ["heads of 15 elements"]),
        ("gpt2-nano", HRM | {"dropout": 0.1}, ["has no dropout"]),
        ("gpt2-nano", {"local_steps": 0}, ["local_steps=0 must be at least 1"]),
        ("gpt2-nano", {"family": "hrm"}, ["hrm-text"]),
        ("gpt2-nano", HRM | {"tied": True}, ["family=hrm-text has tied=false only, and tied=true"]),
        ("gpt2-nano", {"tied": "false"}, ["family=gpt2 has tied=true only"]),
        ("gpt2-nano", {"kv_heads": 2}, ["for each of its heads=4, and kv_heads=2", "family=qwen3"]),
        ("gpt2-nano", QWEN | {"kv_heads": 3}, ["heads=4 cannot be shared out among kv_heads=3"]),
        ("gpt2-nano", QWEN | {"d_model": 60}, ["heads of 15 elements"]),
        ("gpt2-nano", QWEN | {"dropout": 0.1}, ["family=qwen3 has no dropout"]),
        ("gpt2-nano", QWEN | {"head_lr": "1e-3"}, ["head_lr=0.001, but this family=qwen3 has no output matrix"]),
        ("gpt2-nano", {"head_lr": "1e-3"}, ["head_lr=0.001, but this family=gpt2"]),
        ("gpt2-nano", {"embedding_lr": "-1"}, ["embedding_lr=-1.0 must be at least 0"]),
        ("gpt2-nano", {"gain_lr": "fast"}, ["gain_lr='fast' is not a number (highest learning rate of gains"]),
        ("gpt2-nano", {"decay_embeddings": "2"}, ["decay_embeddings='2' is not true or false"]),
        ("gpt2-nano", {"zero_projections": "1"}, ["zero_projections='1' is not true or false"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(preset: str, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.resolve(preset, overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_an_incomplete_configuration_is_refused() -> None:
    values = asdict(config.resolve("gpt2-nano"))
    assert config.from_values(values) == config.resolve("gpt2-nano")
    del values["wire"], values["deterministic"]  # as it was written before there were such settings
    values["compile"] = True  # and before there was auto
    values["loss_tolerance"] = 0.03  # and when there was this
    assert config.from_values(values).compile == "true"
    values["compile"] = "false"
    assert config.from_values(values) == config.resolve("gpt2-nano")
    del values["lr"]
    with pytest.raises(ConfigError, match="lr missing"):
        config.from_values(values)


def test_the_digest_sees_every_setting() -> None:
    assert config.resolve("gpt2-nano").digest() == config.resolve("gpt2-nano").digest()
    assert config.resolve("gpt2-nano").digest() != config.resolve("gpt2-nano", {"clip": 1.5}).digest()


def test_as_a_program() -> None:
    config_of = "-m aura config --preset gpt2-nano --set".split()
    good = run(*config_of, "steps=7", "batch-size=3", "--set", "lr=1e-4")
    assert good.returncode == 0, good.stderr
    values = json.loads(good.stdout)
    assert (values["steps"], values["batch_size"], values["lr"]) == (7, 3, 1e-4)

    bad = run(*config_of, "stepps=7")
    assert (bad.returncode, bad.stdout) == (64, "")
    assert bad.stderr.startswith("Unknown setting 'stepps'.")
    assert bad.stderr.count("\n") == 1


def test_the_commands_that_ansible_calls_import_nothing_heavy() -> None:
    loaded = run(
        "-c",
        "import sys; from aura.commands import cli, config, fingerprint, plan; print(*sys.modules)",
    )
    assert loaded.returncode == 0, loaded.stderr
    assert not {"torch", "numpy", "rich", "tokenizers"} & set(loaded.stdout.split())


LONG = "x" * 300  # no file system has such a name


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "--input", LONG, "--output", "c"],
        ["prepare", "--input", "t.txt", "--output", LONG],
        ["prepare", "--input", "t.txt", "--tokenizer", LONG, "--output", "c"],
        ["prepare", "--dataset", f"{LONG}=1.0", "--output", "c"],
        ["train", "--preset", "gpt2-nano", "--corpus", LONG],
        ["plan", "--preset", "gpt2-nano", "--corpus", LONG],
        ["fingerprint", LONG],
        ["sample", "--run-dir", LONG, "--prompt", "Hola"],
        ["export", "--run-dir", LONG, "--output", "x"],
    ],
    ids=lambda words: " ".join(words[:2]).replace(LONG, "LONG"),
)
def test_a_name_that_the_system_refuses_is_one_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("uno dos tres")
    assert cli.main(words) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "File name too long" in said and said.count("\n") == 1, said


def test_what_one_may_not_read_is_one_sentence_and_a_disk_that_fails_another_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aura_says: Aura
) -> None:
    (tmp_path / "mine").mkdir(mode=0)
    command = [*BOUND, sys.executable, "-m", "aura", "fingerprint", str(tmp_path / "mine/c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith(f"{tmp_path}/mine/c/meta.json: Permission denied. ")

    def failing(argv: list[str]) -> None:
        raise OSError(errno.EIO, "Input/output error", *argv)

    monkeypatch.setattr(cli, "version", failing)
    assert "/mnt/c: Input/output error. See to the disk" in aura_says("version", "/mnt/c", code=1)
    with pytest.raises(OSError, match="Input/output"):
        cli.main(["version"])  # of no file: somebody has to find where


def test_help_and_version(aura_says: Aura) -> None:
    help_ = aura_says("--help")
    assert all(command in help_ for command in cli.COMMANDS)
    assert aura_says("--version")
    assert "torch" in json.loads(aura_says("version"))
    assert "Did you mean 'prepare'?" in aura_says("prepar", code=EXIT_USAGE)


@pytest.mark.parametrize("style", ["-", "_"])
def test_the_flags_of_the_guides(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """000 and 004"""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attempt, "run", lambda *arguments, **_: calls.append(arguments) or 0)
    for flags in (
        "--backend nccl --use-custom-model --custom-preset gpt2-medium --seq-len 512 --batch-size 2 "
        "--gradient-accumulation-steps 16 --precision bf16 --lr 3e-4 --weight-decay 0.02 --log-dir runs/node0 "
        "--corpus c --run-dir r",
        "--model-preset manual --embed-size 96 --num-layers 3 --num-heads 6 --seq-length 64 --gradient-checkpointing "
        "--log-interval 100 --save-steps 500 --learning-rate 1e-3 --epochs 3 --corpus c --compile",
    ):
        words = flags.split()
        words = ["--" + word[2:].replace("-", style) if word.startswith("--") else word for word in words]
        assert cli.main(["train", *words]) == 0
    (made, corpus, run_dir, log_dir, backend, _), (other, *_) = calls
    assert (made.preset, made.batch_size, made.gradient_accumulation_steps) == ("gpt2-medium", 2, 16)
    assert (made.precision, made.lr, made.weight_decay, made.seq_len) == ("bf16", 3e-4, 0.02, 512)
    assert (corpus, run_dir, log_dir, backend) == (Path("c"), Path("r"), Path("runs/node0"), "nccl")
    assert (other.preset, other.d_model, other.layers, other.heads) == ("manual", 96, 3, 6)
    assert (other.gradient_checkpointing, other.epochs, other.log_every) == (True, 3.0, 100)
    assert (other.seq_len, other.lr, other.save_every) == (64, 1e-3, 500)
    assert other.compile == "true"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True", "before torch reads it"


SAMPLE, TRAIN = "sample --run-dir r", "train --preset gpt2-nano --corpus c"


NEEDED = "--corpus/--dataset-path, --preset/--custom-preset/--model-preset"


@pytest.mark.parametrize(
    ("line", "english", "spanish"),
    [
        (f"{TRAIN} --stepps 3",
         "aura train: unknown argument '--stepps'. Did you mean '--steps'? See aura train --help.",
         "aura train: argumento desconocido: '--stepps'. ¿Sería '--steps'? Véase aura train --help."),
        ("train", f"aura train: the following arguments are required: {NEEDED}",
         f"aura train: faltan estos argumentos: {NEEDED}"),
        (f"{SAMPLE} --checkpoint c", "aura sample: argument --checkpoint: not allowed with argument --run-dir",
         "aura sample: argumento --checkpoint: no se admite junto con --run-dir"),
        (f"{SAMPLE} --seed x", "aura sample: argument --seed: invalid int value: 'x'",
         "aura sample: argumento --seed: valor no válido: 'x'"),
        ("config --list=1", "aura config: argument --list: ignored explicit argument '1'",
         "aura config: argumento --list: no lleva ningún valor, y se le ha dado '1'"),
        (f"{TRAIN} --backend mpi",
         "aura train: argument --backend: invalid choice: 'mpi' (choose from 'auto', 'gloo', 'nccl')",
         "aura train: argumento --backend: 'mpi' no existe (hay: 'auto', 'gloo', 'nccl')"),
        ("plan --preset gpt2 --nodes 0", "aura plan: argument --nodes: 0 must be more than 0",
         "aura plan: argumento --nodes: 0 tiene que ser más de 0"),
        ("plan --preset gpt2 --mfu 2", "aura plan: argument --mfu: 2 must be at most 1",
         "aura plan: argumento --mfu: 2 tiene que ser como mucho 1"),
        (f"{TRAIN} --steps 0", "steps=0 must be at least 1 (length of the run [optimizer steps]).",
         "steps=0 tiene que ser al menos 1 (duración del entrenamiento [pasos del optimizador])."),
        (f"{TRAIN} --lr x", "lr='x' is not a number (highest learning rate).",
         "lr='x' no es un número (tasa de aprendizaje más alta)."),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_sentence_in_the_language_of_the_run(
    line: str, english: str, spanish: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for language, sentence in (("en", english), ("es", spanish)):
        monkeypatch.setenv("AURA_LANG", language)
        try:
            code = cli.main(line.split())
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
        assert code == EXIT_USAGE
        assert capsys.readouterr() == ("", sentence + "\n")


def test_of_two_ways_to_say_the_warm_up_a_persons_own_is_meant() -> None:
    assert (config.resolve("gpt2-medium").warmup_steps, config.resolve("gpt2").warmup_steps) == (200, 0)
    assert warmup_steps(config.resolve("gpt2-medium", {"warmup_ratio": 0.1})) == 610
    assert warmup_steps(config.resolve("gpt2", {"warmup_steps": "0"})) == 0
    assert warmup_steps(config.resolve("gpt2", {"warmup_steps": 7})) == 7
    assert warmup_steps(config.resolve("gpt2", {"warmup_steps": 17, "warmup_ratio": 0.03})) == 17
