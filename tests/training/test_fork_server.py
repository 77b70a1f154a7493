"""The process of a rank that has imported torch: after which ends another attempt follows, and who gets signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from aura.run import fork_server
from aura.watch.runs import runs_on
from services import wait_until
from trainers import FORK

Served = Callable[..., BaseProcess]


@pytest.fixture
def served() -> Iterator[Served]:
    """Starts the process; what is left of it ends with the test."""
    started: list[BaseProcess] = []

    def begin_it(
        attempt: Callable[[], int], soon: float = 0.0, before_another: Callable[[], bool] | None = None
    ) -> BaseProcess:
        def serve() -> None:
            fork_server.SOON = soon
            if before_another:
                fork_server._card_is_another = before_another
            sys.exit(fork_server.serve(attempt))

        process = FORK.Process(target=serve, daemon=False)
        process.start()
        started.append(process)
        return process

    yield begin_it
    for process in started:
        process.kill()
        process.join()


def ended(process: BaseProcess) -> int | None:
    process.join(30)
    return process.exitcode


def attempts(file: Path, number: int = 1) -> list[list[int]]:
    """Who has begun (parent and own number), as soon as they are so many."""
    wait_until(lambda: file.exists() and file.read_text().count("\n") >= number, 30, lambda: "")
    return [[int(word) for word in line.split()] for line in file.read_text().splitlines()]


def begin(file: Path) -> None:
    with file.open("a") as lines:
        lines.write(f"{os.getppid()} {os.getpid()}\n")


def wait_for_signal(file: Path, code: int) -> int:
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    begin(file)
    while not told:
        time.sleep(0.02)
    return code


def test_who_asks_to_be_started_again_is_and_leaves_no_helper(served: Served, tmp_path: Path) -> None:
    def attempt() -> int:
        begin(tmp_path / "begun")
        if len(attempts(tmp_path / "begun")) == 3:
            return 64
        helper = subprocess.Popen(["sleep", "60"])
        (tmp_path / f"helper-{os.getpid()}").write_text(str(helper.pid))
        return 75

    process = served(attempt)
    assert ended(process) == 64
    parents, children = zip(*attempts(tmp_path / "begun"), strict=True)
    assert set(parents) == {process.pid}
    assert len(set(children)) == 3
    helpers = [int(file.read_text()) for file in tmp_path.glob("helper-*")]
    assert len(helpers) == 2
    wait_until(lambda: not any(map(runs_on, helpers)), 30, lambda: "")


@pytest.mark.parametrize("code", [0, 1, 65, 69, 75])
def test_any_other_end_and_one_that_comes_soon_is_the_units(
    served: Served, code: int, tmp_path: Path
) -> None:
    process = served(lambda: begin(tmp_path / "begun") or code, soon=30 if code == 75 else 0)
    assert ended(process) == code
    assert len(attempts(tmp_path / "begun")) == 1


@pytest.mark.parametrize(("code", "number"), [(0, 1), (75, 1), (0, 2)])
def test_a_signal_is_the_trainers_and_nothing_follows_it(
    served: Served, code: int, number: int, tmp_path: Path
) -> None:
    def attempt() -> int:
        if number == 2 and not (tmp_path / "begun").exists():
            begin(tmp_path / "begun")
            return 75
        return wait_for_signal(tmp_path / "begun", code)

    process = served(attempt)
    attempts(tmp_path / "begun", number)
    process.terminate()
    assert ended(process) == code
    assert len(attempts(tmp_path / "begun")) == number


def test_who_is_told_to_end_between_two_attempts_begins_none(served: Served, tmp_path: Path) -> None:
    def moved() -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    process = served(lambda: begin(tmp_path / "begun") or 75, before_another=moved)
    assert ended(process) == 75
    assert len(attempts(tmp_path / "begun")) == 1


@pytest.mark.parametrize(("card", "number"), [("lo", 2), ("eth9", 1), ("", 2)])
def test_who_has_its_address_on_another_card_starts_as_a_whole(
    served: Served, card: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """start-rank finds the card; an empty name is one that a person has said."""
    monkeypatch.setenv("AURA_CARD", card)
    monkeypatch.setenv("AURA_ADDRESS", "127.0.0.1")
    process = served(
        lambda: begin(tmp_path / "begun") or (75 if len(attempts(tmp_path / "begun")) == 1 else 64)
    )
    assert ended(process) == (64 if number == 2 else 75)
    assert len(attempts(tmp_path / "begun")) == number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_both_end_by_what_kills_the_trainer(served: Served, number: signal.Signals, tmp_path: Path) -> None:
    process = served(lambda: wait_for_signal(tmp_path / "begun", 0))
    ((_, trainer),) = attempts(tmp_path / "begun")
    os.kill(trainer, number)
    assert ended(process) == -number


def test_the_trainer_does_not_outlive_its_parent(served: Served, tmp_path: Path) -> None:
    process = served(lambda: wait_for_signal(tmp_path / "begun", 0))
    ((_, trainer),) = attempts(tmp_path / "begun")
    process.kill()
    assert ended(process) == -signal.SIGKILL
    wait_until(lambda: not runs_on(trainer), 30, lambda: "")
