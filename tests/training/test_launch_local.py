"""aura launch-local with small scripts, and with two real trainers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from aura.commands import launch_local
from aura.corpus.corpus import Corpus
from aura.errors import EXIT_USAGE, ConfigError
from conftest import Aura
from trainers import TINY, Command

Start = Callable[..., Command]

SCRIPT = """
import json, os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
def note(what): (folder / f"{what}-{rank}").write_text(json.dumps({**os.environ, "argv": sys.argv[2:]}))
"""


@pytest.fixture
def launch(command: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("AURA_LANG", "es")
    return partial(command, "launch-local")


def script(folder: Path, body: str) -> str:
    file = folder / "script.py"
    file.write_text(SCRIPT + body)
    return str(file)


def test_every_rank_gets_its_variables_and_the_worst_exit_code_counts(
    launch: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "7")
    file = script(tmp_path, "note('here'); sys.exit([0, 75, 3][rank])")
    launcher = launch(
        "--gpus=3", "--script", file, "--verbose", "--", str(tmp_path), "--batch_size", "1", "--"
    )
    assert launcher.end() == 3
    notes = [json.loads((tmp_path / f"here-{rank}").read_text()) for rank in range(3)]
    for rank, note in enumerate(notes):
        assert (note["RANK"], note["LOCAL_RANK"], note["WORLD_SIZE"]) == (str(rank), str(rank), "3")
        assert (note["MASTER_ADDR"], note["MASTER_PORT"]) == ("127.0.0.1", notes[0]["MASTER_PORT"])
        assert int(note["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)
        assert note["argv"] == ["--batch_size", "1", "--"]
        assert "TORCHELASTIC_USE_AGENT_STORE" not in note
        assert f"MASTER_PORT={note['MASTER_PORT']}" in launcher.text
    assert int(notes[0]["MASTER_PORT"]) > 1023


def test_who_does_not_notice_that_a_rank_died_is_ended(
    launch: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 ends when asked, rank 2 has to be killed; the exit code is that of rank 1, whose fault it was."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN) if rank == 2 else None\nnote('here')\n"
    body += "while rank == 1 and not all((folder / f'here-{r}').exists() for r in (0, 2)): time.sleep(0.05)\n"
    body += "sys.exit(7) if rank == 1 else time.sleep(120)"
    file = script(tmp_path, body)
    monkeypatch.setattr(launch_local, "GRACE", 0.5)
    launcher = launch("--gpus=3", "--stop-timeout=0.5", f"--script={file}", "--", str(tmp_path))
    assert launcher.end() == 7
    assert "El rank 1 terminó con código 7." in launcher.text
    assert "Todavía en marcha: 0, 2. SIGTERM." in launcher.text
    assert "Todavía en marcha: 2. SIGKILL." in launcher.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(
    launch: Start, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    body = "def save(*_): time.sleep(0.5); note('saved'); sys.exit(0)\n"
    body += f"signal.signal({int(passed_on)}, save); note('here'); time.sleep(120)"
    monkeypatch.setattr(launch_local, "GRACE", 0)
    launcher = launch("--gpus=2", f"--script={script(tmp_path, body)}", "--", str(tmp_path))
    launcher.wait_for(lambda: all((tmp_path / f"here-{rank}").exists() for rank in (0, 1)), "started")
    os.kill(launcher.pid, number)
    assert launcher.end() == 0, launcher.text
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))


def test_two_trainers_stopped_and_one_of_them_killed(launch: Start, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["--gpus=2", "--", "--preset=gpt2-nano", f"--corpus={corpus.path}", f"--run-dir={run_dir}"]
    words += [*TINY.split(), "--steps=1000000", "--save-every=1000000", "--validate-every=1000000"]

    def step() -> int:
        files = [run_dir / f"rank-{rank}" / "status.json" for rank in (0, 1)]
        return min(json.loads(file.read_text())["step"] if file.exists() else 0 for file in files)

    first = launch(*words)
    first.wait_for(lambda: step() > 0, "training")
    os.kill(first.pid, signal.SIGTERM)
    assert first.end() == 0, first.text
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert saved.name.startswith("interrupt-step-")
    for rank in (0, 1):
        assert json.loads((run_dir / f"rank-{rank}" / "status.json").read_text())["state"] == "stopped"

    # The same command goes on from there; without its rank 1 the other one ends by itself.
    (resumed,) = [int(part) for part in saved.name.split("-") if part.isdecimal()]
    second = launch(*words)
    second.wait_for(lambda: step() > resumed, "training again")
    (victim,) = (child for child in psutil.Process(second.pid).children() if child.environ()["RANK"] == "1")
    victim.send_signal(signal.SIGKILL)
    assert second.end() == 128 + signal.SIGKILL, second.text
    assert "El rank 1 terminó con SIGKILL." in second.text
    assert "Todavía en marcha" not in second.text
    status = json.loads((run_dir / "rank-0" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "rank 1" in status["message"]


def test_wrong_usage_starts_nothing(monkeypatch: pytest.MonkeyPatch, aura_says: Aura) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", nothing)
    monkeypatch.setattr(launch_local, "visible_gpus", lambda: 2)
    for words, message in (
        (["--gpus", "0"], "at least 1"),
        (["--gpus", "3"], "more than the 2"),
        (["--gpus", "1", "--master-port", "70000"], "is no port"),
        (["--gpus", "1", "--script", "nowhere.py"], "is no file"),
    ):
        with pytest.raises(ConfigError, match=message):
            launch_local.main(words)
    said = aura_says("launch-local", "--gpus", "1", "--preset", "gpt2-nano", code=EXIT_USAGE)
    assert "unknown argument '--preset'" in said
