"""Training goes on while the optimizer's state of all ranks is put together for a checkpoint, and written; and what
becomes of a run whose disks are full."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aura.checkpoint import store as checkpoint
from aura.checkpoint.manifest import checkpoints, step_of
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.errors import EXIT_USAGE, refusal_of, waiting_mends, why_not_written
from aura.run import saving
from aura.run import start as start_
from aura.run import trainer as train
from aura.strategy import sharded
from trainers import Fault, Trainer, both, complete, infinite_gradient, send_self, start

Collect = Callable[[], dict[str, torch.Tensor]]
STEPS = 18
SETTINGS = f"--keep-checkpoints 9 --save-every 4 --steps {STEPS}"


def before_each_collection(act: Callable[[], None]) -> Fault:
    def apply_update() -> None:
        original = sharded.full_state_dict

        def full_state_dict(*arguments: Any) -> Collect:
            collect = original(*arguments)

            def late() -> dict[str, torch.Tensor]:
                act()
                return collect()

            return late

        sharded.full_state_dict = full_state_dict  # type: ignore[assignment]

    return apply_update


def two_steps_later() -> Fault:
    """What is collected waits until training has gone two steps on, but for the last save."""
    begun: list[int] = []
    another = threading.Condition()
    original = train.learning_rate

    def learning_rate(config: TrainConfig, number: int) -> float:
        with another:
            begun.append(number)
            another.notify_all()
        return original(config, number)

    def wait() -> None:
        now = len(begun)
        with another:
            assert now == STEPS or another.wait_for(lambda: len(begun) >= now + 2, 20), "training waits"

    def apply_update() -> None:
        train.learning_rate = learning_rate  # type: ignore[assignment]
        before_each_collection(wait)()

    return apply_update


def test_a_checkpoint_holds_its_own_step_although_training_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    usual = complete(start(tmp_path / "usual", corpus, 2, SETTINGS))
    faults = dict.fromkeys(range(2), two_steps_later())
    for trainer in complete(start(tmp_path / "late", corpus, 2, SETTINGS, faults)):
        assert trainer.checkpoints() == usual[0].checkpoints(), trainer.text
        assert all(trainer.files(name) == usual[0].files(name) for name in trainer.checkpoints())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_who_dies_or_freezes_while_it_collects_is_named_and_nobody_waits_for_its_part(
    end: signal.Signals, corpus: Corpus, tmp_path: Path
) -> None:
    fault = before_each_collection(send_self(end))
    first, second = start(tmp_path, corpus, 2, f"{SETTINGS} --collective-timeout 600", {1: fault})
    try:
        assert first.end() == 75, first.text
    finally:
        second.process.kill()
    assert "rank 1 on node1" in first.status["message"]
    assert first.checkpoints() == []
    complete(start(tmp_path, corpus, 2, SETTINGS))


def test_a_run_that_ends_for_good_has_saved_what_it_was_saving(corpus: Corpus, tmp_path: Path) -> None:
    """A gradient is no number two steps after a save, while that is still collected."""
    spoil = both(infinite_gradient(6), before_each_collection(lambda: time.sleep(2)))
    ranks = start(tmp_path, corpus, 2, SETTINGS, dict.fromkeys(range(2), spoil))
    for trainer in ranks:
        assert trainer.end() == 65, trainer.text
        assert "The gradient is not finite at step 6" in trainer.text
        assert trainer.checkpoints() == ["checkpoint-step-4"]


def full_disk() -> None:
    def save(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint.write = save  # type: ignore[assignment]


def test_a_rank_that_cannot_save_leaves_it_to_the_others(corpus: Corpus, tmp_path: Path) -> None:
    first, second = complete(start(tmp_path, corpus, 2, faults={1: full_disk}))
    assert first.checkpoints() == ["checkpoint-step-15", "checkpoint-step-20"]
    assert second.checkpoints() == []
    assert "checkpoint-step-5 could not be written: No space left on device." in second.text


LATE = "--optimizer muon --wire int8 --delay 0.5 --gradient-accumulation-steps 2"


@pytest.mark.parametrize("settings", ["", LATE, "--strategy rounds --local-steps 4"])
def test_where_main_memory_is_short_copies_go_into_files_and_nothing_else_changes(
    settings: str, corpus: Corpus, tmp_path: Path
) -> None:
    """On one rank. The files have no names, so nothing is left of them."""

    def no_room() -> None:
        checkpoint.has_room = lambda size: False
        checkpoint.LARGE = 0

    usual = complete(start(tmp_path / "usual", corpus, 2, f"{SETTINGS} {settings}"))
    short = complete(start(tmp_path / "short", corpus, 2, f"{SETTINGS} {settings}", {1: no_room}))
    for trainer, other in zip(usual, short, strict=True):
        assert other.checkpoints() == trainer.checkpoints()
        assert all(other.files(name) == trainer.files(name) for name in trainer.checkpoints())
    assert not [path for path in (short[1].run_dir / "checkpoints").iterdir() if path.is_file()]


def test_a_disk_without_room_for_the_copies_leaves_it_to_the_others(corpus: Corpus, tmp_path: Path) -> None:
    def no_room() -> None:
        def full(descriptor: int, offset: int, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        checkpoint.has_room = lambda size: False
        checkpoint.LARGE = 0
        os.posix_fallocate = full

    first, second = complete(start(tmp_path, corpus, 2, faults={1: no_room}))
    assert first.checkpoints() == ["checkpoint-step-15", "checkpoint-step-20"]
    assert second.checkpoints() == []
    assert "checkpoint-step-5 could not be written: No space left on device." in second.text


def test_too_little_main_memory_for_the_exchange_is_refused_before_anything_begins(
    corpus: Corpus, tmp_path: Path
) -> None:
    def little() -> None:
        start_.psutil.virtual_memory = lambda: SimpleNamespace(available=1000)

    for trainer in start(tmp_path, corpus, 2, faults={1: little}):
        assert trainer.end() == EXIT_USAGE, trainer.text
        assert "of main memory on each PC, and rank 1 on node1" in trainer.status["message"]
        assert not (trainer.run_dir / "checkpoints").exists()


def test_why_a_save_failed_is_said_before_the_next_one() -> None:
    said: list[str] = []
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    saver: Any = SimpleNamespace(error=error, directory=Path("/runs"), is_writing=True)
    others: dict[str, Any] = dict.fromkeys(("snapshot", "comparison", "board", "stop", "status"))
    others["strategy"] = SimpleNamespace(expect_delay=lambda: None)
    speaker: Any = SimpleNamespace(say=said.append)
    beside = saving.Saving(saver, saves=True, speaker=speaker, under_way="checkpoint-step-5", **others)
    step: Any = SimpleNamespace(is_saved=False)
    beside.after(step)
    assert not said
    saver.is_writing = False
    for _ in range(2):
        beside.after(step)
    assert len(said) == 1 and "/runs/checkpoint-step-5 could not be written: No space left" in said[0]


def look_often() -> None:
    saving.LOOK = 0.2


def no_large_files() -> None:
    """As on FAT32, but smaller."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def test_where_nobody_can_save_all_wait_and_stop_when_they_are_asked_to(
    corpus: Corpus, tmp_path: Path
) -> None:
    """One of them may be able to, some day."""
    faults = {0: both(no_large_files, look_often), 1: both(full_disk, look_often)}
    ranks = start(tmp_path, corpus, 2, "--save-every 20", faults)
    for trainer in ranks:
        trainer.says("training waits at step 20")
        assert trainer.status["state"] == "saving"
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert [trainer.end() for trainer in ranks] == [75, 75]
    assert "Stopped at step 20" in ranks[0].status["message"]


def test_where_waiting_mends_nothing_all_end_and_say_what_does(corpus: Corpus, tmp_path: Path) -> None:
    for trainer in start(tmp_path, corpus, 2, faults=dict.fromkeys((0, 1), no_large_files)):
        assert trainer.end() == EXIT_USAGE, trainer.text
        assert "training waits" not in trainer.text
        said = trainer.status["message"]
        assert "The run ends at step 10." in said
        assert said.count(f"): {os.strerror(errno.EFBIG)} (no file may be so large there: ") == 2


def test_a_disk_that_becomes_read_only_ends_it_and_once_mended_it_goes_on(
    corpus: Corpus, tmp_path: Path, small_disk: Path, reference: list[Trainer]
) -> None:
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "run").symlink_to(small_disk)
    (trainer,) = start(tmp_path, corpus, 1, "--steps 100000")
    trainer.says("Saved checkpoint-step-5")
    # A file that is open keeps it from being remounted, so it is laid over itself.
    subprocess.run(["mount", "--bind", small_disk, small_disk], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", small_disk], check=True)
        assert trainer.end() == EXIT_USAGE, trainer.text
    finally:
        subprocess.run(["umount", small_disk], check=True)
    assert f"{os.strerror(errno.EROFS)} (the file system is mounted read-only, " in trainer.text
    newest = max(map(step_of, checkpoints(small_disk / "checkpoints")))
    (trainer,) = complete(start(tmp_path, corpus, 1, f"--steps {newest + 5}"))
    assert f"Continuing after step {newest}." in trainer.text


@pytest.mark.parametrize(
    ("number", "waits", "remedy"),
    [(errno.ENOSPC, True, ""), (errno.ENOMEM, True, ""), (errno.ESTALE, True, ""), (errno.EDQUOT, False, "quota"),
     (errno.EFBIG, False, "no file may be so large"), (errno.EROFS, False, "mounted read-only"),
     (errno.EACCES, False, "the right to write"), (errno.EPERM, False, "the right to write"),
     (errno.EIO, True, "dmesg")],
)  # fmt: skip
def test_what_waiting_mends_and_what_a_person_does_about_the_rest(
    number: int, waits: bool, remedy: str
) -> None:
    error = OSError(number, os.strerror(number), "/runs/a")
    assert waiting_mends(error) == waits
    said = why_not_written(error)
    assert remedy in said and (said != os.strerror(number)) == bool(remedy)
    of_a_name = number in (errno.EROFS, errno.EACCES, errno.EPERM)
    assert refusal_of(error).exit_code == (EXIT_USAGE if of_a_name else 1)


def test_where_nobody_can_save_all_go_on_when_a_disk_has_room(
    corpus: Corpus, tmp_path: Path, small_disk: Path, reference: list[Trainer]
) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "run").symlink_to(small_disk)
    ranks = start(tmp_path, corpus, 2, faults={0: look_often, 1: both(full_disk, look_often)})
    # What was noticed when the next was due
    ranks[0].says("training waits at step 10")
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    complete(ranks)
    assert ranks[0].checkpoints() == ["checkpoint-step-15", "checkpoint-step-20"]
    assert ranks[0].files("checkpoint-step-20") == reference[0].files("checkpoint-step-20")
