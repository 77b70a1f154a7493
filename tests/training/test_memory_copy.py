"""Copies in memory between two checkpoints: a death costs seconds of work, and what is learnt does not change."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from aura.corpus.corpus import Corpus
from aura.run import memory_copy
from trainers import Fault, Faults, Trainer, at_step, complete, send_self, start

SETTINGS = "--steps 120 --save-every 120 --validate-every 120"


def often(memory: Path, also: Fault = lambda: None) -> Fault:
    """Every step or two, where it would be once a minute."""

    def apply_update() -> None:
        os.environ["AURA_MEMORY"] = str(memory)
        memory_copy.LEAST, memory_copy.STALL, memory_copy.BUSY = 1e-4, 1e3, 1e3
        also()

    return apply_update


def ranks(folder: Path, corpus: Corpus, faults: Faults | None = None, settings: str = "") -> list[Trainer]:
    also = faults or {}
    told = {rank: often(folder / f"memory{rank}", also.get(rank, lambda: None)) for rank in range(2)}
    return start(folder, corpus, 2, f"{SETTINGS} {settings}", told)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Trainer:
    return complete(start(tmp_path_factory.mktemp("straight"), corpus, 2, SETTINGS))[0]


@pytest.mark.parametrize("lost", [None, 0, 1], ids=["a process", "rank 0's PC", "rank 1's PC"])
def test_who_dies_costs_a_step_or_two(
    tmp_path: Path, corpus: Corpus, straight: Trainer, lost: int | None
) -> None:
    """With its PC, its disk and its memory too. The bits are those of a run without a death."""
    folder = tmp_path / "run"
    killed = ranks(folder, corpus, {1: at_step(80, send_self(signal.SIGKILL))})
    assert [trainer.end() for trainer in killed] == [75, -signal.SIGKILL]
    assert killed[0].checkpoints() == []
    if lost is not None:
        (folder / f"node{lost}").rename(tmp_path / "gone")
        (folder / f"memory{lost}").rename(tmp_path / "gone too")
    again = complete(ranks(folder, corpus))
    (line,) = [line for line in again[0].text.splitlines() if "Continuing after step" in line]
    assert 60 < int(line.split()[-1].rstrip(".")) < 80, line
    assert again[0].files("checkpoint-step-120") == straight.files("checkpoint-step-120")
    assert not list(folder.glob("memory*/*")), "a run that is done leaves nothing in memory"


def test_copies_are_made_at_the_end_of_a_round_and_change_no_bit(tmp_path: Path, corpus: Corpus) -> None:
    settings = "--strategy rounds --local-steps 7"
    usual = complete(start(tmp_path / "usual", corpus, 2, f"{SETTINGS} {settings}"))
    copied = complete(ranks(tmp_path / "copied", corpus, settings=settings))
    last = [[one.files("checkpoint-step-120") for one in both] for both in (usual, copied)]
    assert last[0] == last[1]

    killed = ranks(tmp_path / "run", corpus, {1: at_step(80, send_self(signal.SIGKILL))}, settings)
    assert [trainer.end() for trainer in killed] == [75, -signal.SIGKILL]
    again = complete(ranks(tmp_path / "run", corpus, settings=settings))
    (line,) = [line for line in again[0].text.splitlines() if "Continuing after step" in line]
    assert int(line.split()[-1].rstrip(".")) in (63, 70, 77), line


def test_without_room_training_goes_on_and_says_so(tmp_path: Path, corpus: Corpus) -> None:
    """On one of two nodes."""

    def no_room() -> None:
        memory_copy._free = lambda directory: 0

    one, other = complete(ranks(tmp_path / "run", corpus, {1: no_room}))
    assert one.done["step"] == other.done["step"] == 120
    assert "memory has no room for copies" in one.text


def test_where_a_disk_is_written_as_often_there_are_no_copies(tmp_path: Path, corpus: Corpus) -> None:
    complete(ranks(tmp_path / "run", corpus, settings="--save-every 1 --keep-checkpoints 1 --steps 40"))
    assert not list((tmp_path / "run").glob("memory*/*"))


def test_alone_too_and_an_older_checkpoint_that_is_asked_for_is_not_overtaken(
    tmp_path: Path, corpus: Corpus
) -> None:
    told, settings = often(tmp_path / "memory"), f"{SETTINGS} --save-every 40"
    dies = often(tmp_path / "memory", at_step(70, send_self(signal.SIGKILL)))
    for fault in (dies, often(tmp_path / "memory", at_step(79, send_self(signal.SIGKILL)))):
        (killed,) = start(tmp_path, corpus, 1, settings, {0: fault})
        assert killed.end() == -signal.SIGKILL
    assert 55 < int(killed.text.split("Continuing after step ")[1].split(".")[0]) < 70
    asked = f"--resume-from {tmp_path}/node0/run/checkpoints/checkpoint-step-40"
    (again,) = complete(start(tmp_path, corpus, 1, f"{settings} {asked}", {0: told}))
    assert "Continuing after step 40." in again.text
