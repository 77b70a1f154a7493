"""training_log.csv across kills, and model_config.json."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from aura import __version__
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.model import export
from aura.run.runlog import COLUMNS, LOG, MODEL_CONFIG, Row, RunLog, write_model_config
from aura.run.status import Status
from aura.run.tensorboard_logger import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainers import at_step, complete, send_self, start

HEADER = ",".join(COLUMNS) + "\n"


def row(step: int) -> Row:
    return Row(step=step, epoch=1, tokens_seen=100 * step, loss=4.5, lr=1e-3, gradient_norm=0.7)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, resumed: int | None, steps: list[int]) -> list[str]:
    said: list[str] = []
    log = RunLog(path, True, None, resumed, said.append)
    for step in steps:
        log.add(row(step))
    log.close()
    return said


def test_every_step_is_there_once_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "run" / LOG
    write(path, None, [5, 10, 15])
    write(path, 10, [15, 20])
    write(path, 20, [25])
    assert [entry["step"] for entry in rows(path)] == ["5", "10", "15", "20", "25"]
    assert list(rows(path)[0]) == COLUMNS
    numbers = {"tokens_seen": "500", "loss": "4.5", "lr": "0.001", "gradient_norm": "0.7"}
    assert rows(path)[0] == dict.fromkeys(COLUMNS, "") | {"step": "5", "epoch": "1"} | numbers
    write(path, None, [])  # a new run begins at nothing
    assert path.read_text() == HEADER


@pytest.mark.parametrize("left", [1, 3, len(HEADER), len(HEADER) + 2, 10_000])
def test_a_broken_last_line_is_dropped(tmp_path: Path, left: int) -> None:
    path = tmp_path / LOG
    write(path, None, [5, 10])
    whole = path.read_bytes()
    path.write_bytes(whole[:left] if left < 10_000 else whole + b"15,1,15")
    write(path, 10, [15])
    steps = [entry["step"] for entry in rows(path)]
    assert steps == (["5", "10", "15"] if left == 10_000 else ["15"])
    assert path.read_text().count(HEADER) == 1


@pytest.mark.parametrize("resumed", [0, 2])
def test_the_curves_show_every_step_once_after_a_restart(resumed: int, tmp_path: Path) -> None:
    """0: it was killed before the first checkpoint."""
    for before, steps in ((0, range(6)), (resumed, range(resumed + 1 if resumed else 0, 4))):
        board = TensorBoardLogger(tmp_path, True, before, print)
        for step in steps:
            board.add("Loss/train_step", before, step)
        board.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("Loss/train_step")
    assert [event.step for event in events] == [0, 1, 2, 3]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG, False, None, None, print)
    log.add(row(1))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_node_takes_from_the_checkpoint_what_its_log_lacks(tmp_path: Path) -> None:
    """And loses what an attempt that was given up has left there; a row that cannot be read counts for nothing."""
    header = HEADER.rstrip() + ",bits_per_byte/es\n"

    def line(step: int, loss: float) -> str:
        return f"{step},1,{100 * step},{loss},,0.001,0.7,1.0,1.0,,{loss / 4}\n"

    def logs(content: str, kept: str | None) -> tuple[RunLog, list[dict[str, str]]]:
        (tmp_path / LOG).write_text(content)
        log = RunLog(tmp_path / LOG, True, kept, 20, print, ["es"])
        log.add(replace(row(25), bits_of_parts={"es": 1.0}))
        log.close()
        return log, rows(tmp_path / LOG)

    well = {5: 4.5, 10: 4.25, 15: 4.0, 20: 3.75}
    kept = header + "".join(line(step, loss) for step, loss in well.items())
    away = header + line(5, 4.5) + line(10, 4.375) + line(12, 4.5).replace("4.5", "4\0") + line(30, 1.0)
    log, found = logs(away, kept)
    said = [(one.step, one.loss, one.bits_of_parts["es"]) for one in log.missed]
    assert said == [(15, 4.0, 1.0), (20, 3.75, 0.9375)]
    assert {int(one["step"]): float(one["loss"]) for one in found[:4]} == well
    assert found[4]["step"] == "25" and found[4]["bits_per_byte/es"] == "1.0" and len(found) == 5
    assert (tmp_path / LOG).read_text() == log.text
    # Of a checkpoint without one: an older release has written it.
    log, found = logs(away, None)
    assert [one["step"] for one in found] == ["5", "10", "25"] and log.missed == []


def test_a_rank_that_writes_no_log_knows_it(tmp_path: Path) -> None:
    """Its checkpoint may be the one that all go on from."""
    quiet = RunLog(tmp_path / "none" / LOG, False, None, None, print)
    writing = RunLog(tmp_path / LOG, True, None, None, print)
    for log in (quiet, writing):
        log.add(row(5))
    assert quiet.text == writing.text == (tmp_path / LOG).read_text()
    assert not (tmp_path / "none").exists()


def test_a_log_with_other_columns_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / LOG
    path.write_text("epoch,loss\n1,2.5\n")
    (sentence,) = write(path, 10, [15])
    (aside,) = set(tmp_path.iterdir()) - {path}
    assert aside.name in sentence
    assert aside.read_text() == "epoch,loss\n1,2.5\n"
    assert [entry["step"] for entry in rows(path)] == ["15"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path: Path) -> None:
    said: list[str] = []
    log = RunLog(tmp_path / LOG, True, None, None, said.append)
    assert log.descriptor is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log.descriptor)
    os.close(full)
    log.add(row(1))
    log.add(row(2))
    assert said == [f"{tmp_path / LOG} gets nothing more: No space left on device."]


def test_a_status_keeps_the_last_word_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    """And not that one's."""
    file = tmp_path / "status.json"
    Status(file).set(state="failed", step=7, message="rank 2 is silent", exit_code=75, pid=1)
    for before in ({"pid": 1, "step": 7, "message": "rank 2 is silent"}, {"step": 0, "message": "two"}):
        Status(file).set(state="joining", message="two")
        said = json.loads(file.read_text())["before"]
        assert said.items() >= before.items() and "before" not in said
    file.write_text("[half")
    assert Status(file).fields["before"] is None


def test_a_status_that_cannot_be_written_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "rank-0"
    status = Status(place / "status.json")
    for trouble in range(2):
        place.write_text("a file where the directory should be")
        for message in ("one", "two"):
            status.set(message=f"{message}, {trouble}")
        assert capsys.readouterr().out.count("cannot be written") == 1
        place.unlink()
        status.set(message=f"well, {trouble}")
        (place / "status.json").unlink()
        place.rmdir()


def test_model_config_names_everything(corpus: Corpus, tmp_path: Path) -> None:
    config = resolve("gpt2-nano", {"lr": "2e-3"})
    write_model_config(tmp_path, config, corpus, 123, 4096)
    content = json.loads((tmp_path / MODEL_CONFIG).read_text())
    assert {name: content[name] for name in vars(config)} == vars(config)
    assert (content["parameters"], content["step_tokens"]) == (123, 4096)
    assert content["corpus_fingerprint"] == corpus.fingerprint
    assert content["tokenizer_sha256"] == corpus.tokenizer_sha256
    assert content["versions"]["aura"] == __version__
    assert content["versions"]["torch"]


def test_what_a_killed_run_leaves_when_it_is_done(corpus: Corpus, tmp_path: Path) -> None:
    """Every step once in the log; model_config.json and the final model. Then again from an older checkpoint."""
    (trainer,) = start(tmp_path, corpus, 1, faults={0: at_step(19, send_self(signal.SIGKILL))})
    assert trainer.end() == -signal.SIGKILL
    before = rows(trainer.run_dir / LOG)
    assert [entry["step"] for entry in before] == ["1", "5", "10", "15"]
    resumed = complete(start(tmp_path, corpus, 1))[0]
    found = re.search(r"Continuing after step (\d+)\.", resumed.text)
    assert found  # 15, or 10 when it was killed before step 15 was on the disk
    steps = {1, 5, 10, 15, int(found[1]) + 1, 20}
    after = rows(trainer.run_dir / LOG)
    assert [int(entry["step"]) for entry in after] == sorted(steps)
    assert after[:3] == before[:3]
    assert [entry["step"] for entry in after if entry["validation_loss"]] == ["10", "20"]
    assert (trainer.run_dir / MODEL_CONFIG).is_file()
    final = (trainer.run_dir / "final" / export.MODEL).read_bytes()
    assert export.load(trainer.run_dir / "final").seq_len == 16

    there = trainer.run_dir / "checkpoints" / "checkpoint-step-15"
    again = complete(start(tmp_path, corpus, 1, f"--resume-from {there}"))[0]
    assert "Continuing after step 15." in again.text
    assert [int(entry["step"]) for entry in rows(trainer.run_dir / LOG)] == sorted({*steps, 16})
    assert any(name.startswith("superseded-checkpoint-step-20") for name in again.checkpoints())
    assert (trainer.run_dir / "final" / export.MODEL).read_bytes() == final  # the same steps, the same bits


def test_a_rank_that_saves_and_does_not_log_knows_the_rows_of_its_node(tmp_path: Path) -> None:
    """Of a checkpoint of an older release, which has no log."""
    write(tmp_path / LOG, None, [1, 2, 3])
    log = RunLog(tmp_path / LOG, False, None, 2, print)
    assert sorted(log.rows) == [1, 2]
