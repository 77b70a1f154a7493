"""How a run ends, and what a start finds that comes after it, in real trainer processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from aura.checkpoint import store
from aura.checkpoint.manifest import MANIFEST, STATE
from aura.cluster import activity
from aura.cluster.process_group import ProcessGroup
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus, sha256_of
from aura.corpus.sequences import Sequences
from aura.errors import EXIT_TEMPORARY, EXIT_USAGE, ConfigError
from aura.model import export
from aura.model.gpt import GPT
from aura.optim.adamw import AdamW
from aura.run import attempt, final, memory_dry_run, stop
from aura.texts.console import text
from conftest import flip_a_bit
from safetensors.torch import load_file
from spanish import english_in
from trainers import Fault, Trainer, at_step, complete, send_self, start, stop_at


def test_a_rank_that_lost_only_the_mark_of_its_end_does_not_wait(
    reference: list[Trainer], corpus: Corpus, tmp_path: Path
) -> None:
    shutil.copytree(reference[0].run_dir.parents[1], tmp_path / "copy")
    (tmp_path / "copy/node1/run/done.json").unlink()
    (_, late) = start(tmp_path / "copy", corpus, 2, faults={0: send_self(signal.SIGKILL)})
    assert late.end() == 0
    assert late.done["validation_loss"] == reference[1].done["validation_loss"]
    assert (late.status["state"], late.status["step"]) == ("done", 20)


@pytest.mark.parametrize("steps", [[20], [20, 30]], ids=["none is there", "it has fewer steps"])
def test_a_final_model_that_was_not_written_is_written_by_the_next_start(
    steps: list[int], corpus: Corpus, tmp_path: Path
) -> None:
    def end_there() -> None:
        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        final.export_checkpoint = die

    for fewer in steps[:-1]:
        complete(start(tmp_path, corpus, 1, f"--steps {fewer}"))
    settings = f"--steps {steps[-1]}"
    (killed,) = start(tmp_path, corpus, 1, settings, faults={0: end_there})
    assert killed.end() == -signal.SIGKILL
    assert killed.done["step"] == steps[-1]
    assert (killed.run_dir / "final").exists() == (len(steps) > 1)
    (again,) = complete(start(tmp_path, corpus, 1, settings))
    assert f"is done: {steps[-1]} steps" in again.text
    model = export.load(killed.run_dir / "final")
    saved = load_file(killed.run_dir / "checkpoints" / f"checkpoint-step-{steps[-1]}" / "model.safetensors")
    assert torch.equal(model.wpe.weight, saved["wpe.weight"])
    assert "Final model" in again.text
    assert "Final model" not in complete(start(tmp_path, corpus, 1, settings))[0].text  # once is enough


def test_where_rank_0_died_before_it_exported_others_have_the_final_model(
    reference: list[Trainer], corpus: Corpus, tmp_path: Path
) -> None:
    shutil.copytree(reference[0].run_dir.parents[1], tmp_path / "copy")
    assert not (tmp_path / "copy/node1/run/final").exists()
    know_each_other = partial(os.environ.update, AURA_PEERS="127.0.1.0,127.0.1.1", AURA_LAUNCH="first")
    faults = {0: send_self(signal.SIGKILL), 1: know_each_other}
    (_, other) = start(tmp_path / "copy", corpus, 2, faults=faults)
    assert other.end() == 0
    export.load(other.run_dir / "final")


@pytest.mark.parametrize("settings", ["--log-every 7", "--steps 15", "--lr 1e-2"])
def test_a_finished_run_with_other_settings_has_nothing_left_to_train(
    settings: str, reference: list[Trainer], corpus: Corpus, tmp_path: Path
) -> None:
    shutil.copytree(reference[0].run_dir.parents[1], tmp_path / "copy")
    ranks = start(tmp_path / "copy", corpus, 2, settings)
    for trainer, before in zip(ranks, reference, strict=True):
        assert trainer.end() == 64
        assert "This run has 20 steps" in trainer.text
        assert "nothing is left to train. More --steps" in trainer.text
        assert trainer.done == before.done
        assert trainer.checkpoints() == before.checkpoints()


def test_epochs_are_counted_in_what_was_seen_whatever_the_number_of_ranks(
    corpus: Corpus, tmp_path: Path
) -> None:
    sequences = len(Sequences(corpus, "train", 16))
    settings = "--epochs 2 --batch-size 100 --warmup-steps 0 --validation-windows 2"
    stop_at(2, tmp_path, corpus, 2, settings)
    (one,) = complete(start(tmp_path, corpus, 1, settings))
    seen = one.done["tokens_seen"] // 16
    assert 2 * sequences <= seen < 2 * sequences + 100
    losses = r"Training loss: \d\.\d{4} \| Validation loss: \d\.\d{4}"
    epochs = re.findall(rf"(Epoch \d+/\d+) \| {losses} \| Epoch took: \d+\.\ds$", one.text, re.M)
    assert epochs == ["Epoch 1/2", "Epoch 2/2"]
    # The same run with other ranks is still done.
    assert f"is done: {one.done['step']} steps" in complete(start(tmp_path, corpus, 1, settings))[0].text


@pytest.mark.parametrize("code", [0, 75])
def test_who_follows_another_that_is_stopped_may_be_stopped_a_moment_later(
    code: int, corpus: Corpus, tmp_path: Path
) -> None:
    """It has saved at the same step, and is not started again for that moment; the others are told of it too."""

    def be_told_late() -> None:
        comes_within, says = stop.StopSignal.comes_within, ProcessGroup.say_that_it_leaves

        def told(self: stop.StopSignal, seconds: float) -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return comes_within(self, seconds)

        def say(self: ProcessGroup) -> None:
            says(self)
            print("It says that it leaves.")

        stop.StopSignal.comes_within, ProcessGroup.say_that_it_leaves = told, say  # type: ignore[method-assign]

    first = at_step(9, send_self(signal.SIGTERM))
    ranks = start(tmp_path, corpus, 2, faults={0: first, 1: be_told_late if code == 0 else lambda: None})
    assert [rank.end() for rank in ranks] == [0, code]
    assert ("It says that it leaves." in ranks[1].text) is (code == 0)
    status = ranks[1].status
    assert (status["state"], status["step"]) == ("stopped", ranks[0].status["step"])
    assert status["message"] == text("stopped" if code == 0 else "stopped_with_another")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_training_saves_although_nobody_reads_its_lines_any_more(
    number: signal.Signals, corpus: Corpus, tmp_path: Path
) -> None:
    """Ctrl+C in `aura train | tee log` ends tee first; SIGHUP is what a closed terminal sends."""

    def lose_the_reader() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, where the tests run under it
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        at_step(7, send_self(number))()

    (trainer,) = start(tmp_path, corpus, 1, faults={0: lose_the_reader})
    assert trainer.end() == 0
    assert trainer.checkpoints()[-1].startswith("interrupt-step-")


def test_a_node_whose_disk_is_full_from_the_start_trains_to_the_end(
    corpus: Corpus, tmp_path: Path, small_disk: Path
) -> None:
    with contextlib.suppress(OSError), (small_disk / "big").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "run").symlink_to(small_disk)
    first, second = complete(start(tmp_path, corpus, 2))
    assert first.checkpoints() == ["checkpoint-step-15", "checkpoint-step-20"]
    assert f"{second.run_dir} does not get all of its files: No space left on device." in second.text
    assert [*small_disk.rglob("checkpoint-step-*")] == []


def test_a_disk_that_has_not_even_room_for_a_directory_stops_nobody(corpus: Corpus, tmp_path: Path) -> None:
    """On ext4 a directory needs a block; on the small disk of the test above it needs none."""

    def no_block() -> None:
        original = Path.mkdir

        def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
            if "checkpoints" in self.parts:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(self, *arguments, **options)

        Path.mkdir = mkdir  # type: ignore[method-assign]

    first, second = complete(start(tmp_path, corpus, 2, faults={1: no_block}))
    assert first.checkpoints() == ["checkpoint-step-15", "checkpoint-step-20"]
    assert f"{second.run_dir} does not get all of its files: No space left on device." in second.text
    assert "checkpoint-step-5 could not be written: No space left on device." in second.text


def test_one_directory_has_one_trainer(corpus: Corpus, tmp_path: Path) -> None:
    (first,) = start(tmp_path, corpus, 1, "--steps 100000")
    first.says("Step 5 |")
    for ranks in (1, 2):  # the second time as torchrun does it
        for second in start(tmp_path, corpus, ranks, one_disk=True):
            assert second.end() == EXIT_USAGE
            assert f"Another `aura train` is at work in {first.run_dir}" in second.text
    os.kill(first.pid, signal.SIGTERM)
    assert first.end() == 0
    asked = f"Asked to stop: at the end of this step all is saved. (kill -9 {first.pid} "
    assert first.text.count(asked) == 1
    status = json.loads((first.run_dir / "rank-0/status.json").read_text())
    assert status["state"] == "stopped"
    complete(start(tmp_path, corpus, 1, f"--steps {status['step'] + 1}"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_directory_that_cannot_be_is_refused_in_a_sentence(
    ranks: int, corpus: Corpus, tmp_path: Path
) -> None:
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "run").touch()
    for trainer in start(tmp_path, corpus, ranks):
        assert trainer.end() == (EXIT_USAGE if ranks == 1 else 1)
        assert trainer.text.startswith(f"The run directory {trainer.run_dir} cannot be used: File exists.")
        assert "Traceback" not in trainer.text


def test_the_directory_of_a_model_is_not_written_over(corpus: Corpus, tmp_path: Path) -> None:
    config, of_a_model = tmp_path / "node0/run/config.json", '{"architectures": ["GPT2LMHeadModel"]}'
    config.parent.mkdir(parents=True)
    config.write_text(of_a_model)
    (trainer,) = start(tmp_path, corpus, 1)
    assert trainer.end() == EXIT_USAGE
    assert f"{config.parent} is no run: its config.json is that of a model" in trainer.text
    assert config.read_text() == of_a_model
    assert list(config.parent.iterdir()) == [config]


def test_what_begins_anew_has_the_tokenizer_of_its_own_corpus(corpus: Corpus, tmp_path: Path) -> None:
    """A start that was given up has left another one, and with it `final/` would speak another language."""
    other = tmp_path / "node0/run/tokenizer.json"
    other.parent.mkdir(parents=True)
    for steps in (5, 10):  # the second time as on a PC that comes later
        other.write_text("{}")
        complete(start(tmp_path, corpus, 1, f"--steps {steps}"))
        assert other.read_text() == (corpus.path / "tokenizer.json").read_text()


def test_what_nobody_foresaw_takes_the_compiled_kernels_with_it(corpus: Corpus, tmp_path: Path) -> None:
    """A power cut may have left half of one, which torch would read at every start."""

    def fail() -> None:
        def unforeseen(*_: object) -> None:
            raise RuntimeError("half a kernel")

        at_step(2, lambda: setattr(GPT, "loss_sum", unforeseen))()

    (tmp_path / "node0/run/compiled").mkdir(parents=True)
    (trainer,) = start(tmp_path, corpus, 1, faults={0: fail})
    assert trainer.end() == 1
    assert "RuntimeError: half a kernel" in trainer.text
    assert not (trainer.run_dir / "compiled").exists()


def test_who_is_refused_before_it_meets_the_others_says_so_in_its_status(
    corpus: Corpus, tmp_path: Path
) -> None:
    def useless() -> None:
        def refuse(*_: object) -> None:
            raise ConfigError("run_dir_taken", path="/card")

        attempt.choose_device = refuse  # type: ignore[assignment]

    (trainer,) = start(tmp_path, corpus, 1, faults={0: useless})
    assert trainer.end() == EXIT_USAGE
    assert trainer.status["state"] == "failed" and trainer.status["exit_code"] == EXIT_USAGE
    assert "/card" in trainer.status["message"]


def test_a_corpus_that_the_system_does_not_give_to_one_ends_all_with_its_sentence(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Nothing starts it again, so the others would wait for it for ever."""

    def closed() -> None:
        def read(path: Path) -> Corpus:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        attempt.read_corpus = read

    ranks = start(tmp_path, corpus, 3, faults={1: closed})
    for trainer in ranks:
        assert trainer.end() == EXIT_USAGE
        assert f"{corpus.path}" in trainer.status["message"] and "Permission denied" in trainer.text
        assert trainer.status["state"] == "failed" and "Traceback" not in trainer.text
    assert all("rank 1 on node1 (127.0.0.1) cannot take part: " in ranks[other].text for other in (0, 2))


def test_a_run_whose_checkpoints_are_all_refused_does_not_begin_anew(corpus: Corpus, tmp_path: Path) -> None:
    """Neither for who has them nor for a PC that is new; and when the disk is mended, it goes on."""
    complete(start(tmp_path, corpus, 2, "--steps 15"))
    shutil.rmtree(tmp_path / "node1")
    there = tmp_path / "node0/run/checkpoints"
    files = [there / f"checkpoint-step-{step}/model.safetensors" for step in (10, 15)]
    for file in files:
        flip_a_bit(file)
    names = {path.name for path in there.iterdir()}
    for trainer in start(tmp_path, corpus, 2):
        assert trainer.end() == EXIT_TEMPORARY, trainer.text
        said = f"All checkpoints of this run are refused: {there} (rank 0 on node0). Nothing was changed"
        assert trainer.status["message"].startswith(said)
    assert {path.name for path in there.iterdir()} == names
    for file in files:
        flip_a_bit(file)
    for trainer in complete(start(tmp_path, corpus, 2)):
        assert "Continuing after step 15." in trainer.text


def test_ranks_go_on_with_one_state_though_their_disks_have_two(
    reference: list[Trainer], corpus: Corpus, tmp_path: Path
) -> None:
    """With the same parameters, and whole: two attempts may have computed the same step."""
    stop_at(9, tmp_path, corpus, 2)
    (path,) = tmp_path.glob("node1/run/checkpoints/interrupt-step-*")
    state = json.loads((path / STATE).read_text())
    state["progress"]["windows_seen"] += 2
    (path / STATE).write_text(json.dumps(state))
    written = json.loads((path / MANIFEST).read_text())
    written["files"][STATE] = {"sha256": sha256_of(path / STATE), "bytes": (path / STATE).stat().st_size}
    (path / MANIFEST).write_text(json.dumps(written))
    for trainer in complete(start(tmp_path, corpus, 2)):
        assert "REFUSED" not in trainer.text
        assert trainer.files("checkpoint-step-20") == reference[0].files("checkpoint-step-20")


def test_a_rank_with_another_torch_is_named_and_nobody_waits_for_it(corpus: Corpus, tmp_path: Path) -> None:
    def another_torch() -> None:
        attempt.versions = lambda backend: {"torch": "2.1.0", "nccl": ""}

    for trainer in start(tmp_path, corpus, 3, faults={2: another_torch}):
        assert trainer.end() == 64
        assert "rank 2 on node2 (127.0.0.1) torch 2.1.0, the others torch" in trainer.text


exhaust_memory = at_step(5, lambda: setattr(GPT, "loss_sum", lambda *_: torch.empty(1 << 50)))


def test_out_of_memory_on_one_rank_ends_all_with_its_sentence(corpus: Corpus, tmp_path: Path) -> None:
    for trainer in start(tmp_path, corpus, 2, faults={1: exhaust_memory}):
        assert trainer.end() == 64, trainer.text
        said = trainer.status["message"]
        assert "Out of memory on rank 1 on node1 with a micro-batch of 2 x 16 tokens." in said
        way_out = "--gradient-checkpointing true --batch-size 1 --gradient-accumulation-steps 2"
        assert re.search(rf"The same step needs \d\d% of the memory with .*{way_out}$", said), said


def test_what_does_not_fit_a_card_is_said_before_the_first_step(corpus: Corpus, tmp_path: Path) -> None:
    def small_card() -> None:
        memory_dry_run.is_bounded = lambda device: True  # type: ignore[assignment]
        forward_and_backward = memory_dry_run.forward_and_backward

        def bounded(config: TrainConfig, model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> None:
            if len(inputs) > 1:
                raise torch.OutOfMemoryError
            forward_and_backward(config, model, inputs, targets)

        memory_dry_run.forward_and_backward = bounded  # type: ignore[assignment]

    for trainer in start(tmp_path / "large", corpus, 2, faults={1: small_card}):
        assert trainer.end() == 64, trainer.text
        said = trainer.status["message"]
        assert "Out of memory on rank 1 on node1 with a micro-batch of 2 x 16 tokens." in said
        assert "--batch-size 1 --gradient-accumulation-steps 2" in said
        assert trainer.status["step"] == 0 and "Step 1/" not in trainer.text
    complete(start(tmp_path / "small", corpus, 2, "--batch-size 1 --steps 2", faults={1: small_card}))


def hang() -> None:
    time.sleep(1000)


def hang_in_the_update() -> None:
    """The others, who wait for its weights in their forward pass, are in the next step by then."""
    AdamW.step = lambda *_: hang()  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(("guilty", "act"), [(0, hang), (1, hang_in_the_update)])
def test_a_rank_that_hangs_is_named_by_all(
    guilty: int, act: Callable[[], None], corpus: Corpus, tmp_path: Path
) -> None:
    """Its heartbeat goes on, and nothing in its step counts as stalled yet when the others' exchange gives up."""
    settings = "--steps 40 --validate-every 50 --save-every 50 --collective-timeout 600 --log-every 50"
    for trainer in start(tmp_path, corpus, 3, settings, faults={guilty: at_step(30, act)}):
        assert trainer.end() == 75, trainer.text
        (sentence,) = re.findall(r"rank \d on node\d .* hangs: .*", trainer.text)  # said once
        hangs = f"rank {guilty} on node{guilty} (127.0.0.1) hangs: step 30 has not ended for"
        assert sentence.startswith(hangs)
        assert sentence == trainer.status["message"]


@pytest.mark.parametrize(
    ("fault", "corpus_of_1", "code"),
    [(at_step(12, send_self(signal.SIGKILL)), "", 75), (exhaust_memory, "", 64), (lambda: None, "nada", 65)],
    ids=["killed", "memory", "corpus"],
)
def test_a_spanish_run_speaks_spanish_whatever_happens(
    fault: Fault, corpus_of_1: str, code: int, corpus: Corpus, tmp_path: Path
) -> None:
    corpora = [corpus, replace(corpus, path=tmp_path / corpus_of_1) if corpus_of_1 else corpus]
    ranks = start(tmp_path, corpora, 2, "--collective-timeout 10", faults={1: fault}, language="es")
    assert ranks[0].end() == code, ranks[0].text
    said = f"{ranks[0].text} {ranks[0].status['message']}".replace(str(tmp_path), "")
    assert "rank 1 en node1" in ranks[0].status["message"]
    assert not english_in(said), said
    assert not corpus_of_1 or ranks[1].end() == code, ranks[1].text
    ranks[1].process.kill()


def test_a_lone_rank_that_hangs_says_so_and_no_longer_answers_systemd(corpus: Corpus, tmp_path: Path) -> None:
    name = f"aura-{os.getpid()}-{time.monotonic_ns()}"

    def hang() -> None:
        os.environ.update(NOTIFY_SOCKET=f"@{name}", AURA_WATCHDOG="120")
        activity.LEAST = 1.0
        at_step(10, lambda: time.sleep(1000))()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.settimeout(60)
        (trainer,) = start(tmp_path, corpus, 1, faults={0: hang})
        assert systemd.recv(100) == b"WATCHDOG_USEC=120000000"
        with contextlib.suppress(TimeoutError):
            while systemd.recv(100) == b"WATCHDOG=1":
                systemd.settimeout(8)
    assert "This rank hangs: step 10 has not ended for" in trainer.text
    trainer.process.kill()


def test_ranks_of_one_disk_go_back_together(corpus: Corpus, tmp_path: Path) -> None:
    """No rank takes the newer checkpoints for its own before rank 0 has set them aside."""

    def be_slow() -> None:
        go_back_to = store.go_back_to

        def slowly(path: Path) -> None:
            time.sleep(1)
            go_back_to(path)

        store.go_back_to = slowly

    first = complete(start(tmp_path, corpus, 2, one_disk=True))[0]
    path = first.run_dir / "checkpoints" / "checkpoint-step-15"
    with_flag = f"--resume-from {path}"
    for trainer in complete(start(tmp_path, corpus, 2, with_flag, {0: be_slow}, one_disk=True)):
        assert "Continuing after step 15." in trainer.text

    # What cannot go on from it is refused before the newer one is touched.
    before = first.checkpoints()
    for other, sentence in (("--seed 9", "asks for 9"), ("--steps 15", "nothing is left to train")):
        for trainer in start(tmp_path, corpus, 2, f"{with_flag} {other}", one_disk=True):
            assert trainer.end() == EXIT_USAGE
            assert sentence in trainer.text
        assert first.checkpoints() == before
    (path / "model.safetensors").write_bytes(b"x")
    for trainer in start(tmp_path, corpus, 2, with_flag, one_disk=True):
        assert trainer.end() == 65
        assert "cannot be used: model.safetensors has 1 bytes" in trainer.text
    assert first.checkpoints() == before
