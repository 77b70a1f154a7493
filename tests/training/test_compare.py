"""`aura compare`, of real runs of tiny models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from aura.commands import compare
from aura.corpus.corpus import Corpus
from aura.run.runlog import COLUMNS
from conftest import Aura, prepare
from trainers import complete, start, stop_at

Runs = tuple[Path, Path]


@pytest.fixture(scope="module")
def runs(corpus: Corpus, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One of two ranks, and one, with tokens of nearly a byte, that was asked to stop and went on."""
    folder = tmp_path_factory.mktemp("compare")
    other = prepare([text], folder / "corpus", vocab_size=270, validation_fraction=0.1)
    settings = "--steps 40 --validate-every 8 "
    words = complete(start(folder / "words", corpus, 2, settings + "--batch-size 1 --lr 1e-3"))
    stop_at(13, folder / "letters", other, 1, settings + "--lr 1e-2")
    letters = complete(start(folder / "letters", other, 1, settings + "--lr 1e-2"))
    for name, trainer in (("words", words[0]), ("letters", letters[0])):
        shutil.copytree(trainer.run_dir, folder / "runs" / name)
    return folder / "runs/words", folder / "runs/letters"


def damaged(run: Path, to: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(run, to)
    content = (to / file).read_text(encoding="utf-8")
    (to / file).write_text(re.sub(old, new, content), encoding="utf-8")
    return to


def test_two_runs_side_by_side(runs: Runs, monkeypatch: pytest.MonkeyPatch, aura_says: Aura) -> None:
    monkeypatch.chdir(runs[0].parents[1])
    shown = aura_says("compare", "words", "runs/letters")
    rows = {row[0]: row[1:] for line in shown.splitlines() if len(row := re.split(r"  +", line)) == 3}
    assert rows["preset (family)"] == ["gpt2-nano (gpt2)"] * 2
    assert rows["vocabulary"] == ["300", "270"]
    assert rows["steps"] == ["40 / 40"] * 2
    assert rows["tokens"] == ["1,280"] * 2
    assert rows["lr"] == ["0.001", "0.01"]
    assert rows["batch_size"] == ["1", "2"]
    assert "seed" not in rows and "GPU-hours" not in rows and "rank-hours (no GPU)" in rows
    finals = [json.loads((run / "rank-0/status.json").read_text())["bits_per_byte"] for run in runs]
    assert rows["bits per byte at the end"] == [f"{bits:.4f}" for bits in finals]
    assert "The corpora differ" in shown and "validation_windows differs" not in shown
    first, second = re.findall(r"^(\w+) reaches (.*) bits per byte after (.*) tokens", shown, re.MULTILINE)
    assert (first[0], second[0]) == ("words", "letters")
    assert first[1] == second[1] == rows["best bits per byte"][1][:6]
    assert "times the tokens" in shown
    monkeypatch.setenv("AURA_LANG", "es")
    assert "words llega a" in aura_says("compare", "words", "letters")


def test_for_machines(runs: Runs, aura_says: Aura) -> None:
    told = json.loads(aura_says("compare", *map(str, runs), "--json"))
    words, letters = told["runs"]
    assert (words["ranks"], letters["ranks"], letters["step"], letters["on_gpu"]) == (2, 1, 40, False)
    assert [point["tokens"] for point in words["curve"]] == [32 * step for step in (8, 16, 24, 32, 40)]
    assert told["tokens"] == [320, 640, 1280]
    assert told["bits_per_byte"][1][-1] == letters["curve"][-1]["bits"]
    of_words, of_letters = told["reached"]
    assert of_words["tokens"] < of_letters["tokens"] <= 1280
    # The seconds of its only epoch, that of both of its attempts, are those of the steps.
    last = [line.split(",") for line in (runs[1] / "training_log.csv").read_text().splitlines()][-1]
    assert letters["seconds"] == pytest.approx(float(last[COLUMNS.index("seconds")]), rel=0.01)


def test_seconds_are_those_of_the_steps_whatever_counts_as_a_token(
    runs: Runs, tmp_path: Path, aura_says: Aura
) -> None:
    """Of dialogues only answers count; an epoch begins its seconds anew; the first step after a start is slow."""
    tuned = damaged(runs[1], tmp_path / "tuned", "training_log.csv", r"(?s)\n.*", "\n")
    place = {name: COLUMNS.index(name) for name in ("step", "epoch", "tokens_seen", "loss", "seconds")}
    with (tuned / "training_log.csv").open("a") as log:
        for values in ((10, 1, 70, 5, 2.5), (20, 1, 140, 5, 5), (21, 2, 147, 5, 40), (30, 2, 210, 5, 42)):
            row = dict(zip(place, values, strict=True))
            log.write(",".join(str(row.get(name, "")) for name in COLUMNS) + "\n")
    said = aura_says("compare", str(runs[0]), str(tuned), "--json")
    assert json.loads(said)["runs"][1]["seconds"] == pytest.approx(47)


def test_between_two_validations() -> None:
    points = [compare.Point(100, 1, 4.0), compare.Point(400, 4, 2.0), compare.Point(800, 8, 2.5)]
    run = compare.Run("x", {}, 1, 1, "", "", 1, False, 3, 800, 8.0, None, points)
    assert run.bits_at(200) == pytest.approx(3.0)
    assert (run.bits_at(50), run.bits_at(800)) == (4.0, 2.5)
    reached = run.reaches(3.0)
    assert (reached.tokens, reached.seconds) == (pytest.approx(200), pytest.approx(2.0))
    assert run.best == points[1] and run.reaches(2.0).tokens == pytest.approx(400)
    assert run.reaches(5.0) == points[0]


def test_a_run_that_is_under_way_or_was_killed_is_compared_as_far_as_it_is(
    runs: Runs, tmp_path: Path, aura_says: Aura
) -> None:
    young = damaged(runs[1], tmp_path / "young", "training_log.csv", r"(?s)\n24,.*", "\n24,1,7")
    (young / "done.json").unlink()
    assert re.search(r"steps +40 / 40 +20 / 40", aura_says("compare", str(runs[0]), str(young)))


def test_hours_are_those_of_gpus_where_there_are_some_and_of_who_was_there(
    runs: Runs, tmp_path: Path, aura_says: Aura
) -> None:
    card = damaged(runs[0], tmp_path / "card", "rank-0/status.json", '"device": "cpu"', '"device": "cuda:0"')
    less = damaged(card, tmp_path / "less", "rank-0/status.json", r'"away": \[\]', '"away": [1]')
    shown = aura_says("compare", str(card), str(less), str(runs[1]))
    two, one, none = re.search(r"GPU-hours +(\S+) +(\S+) +(\S+)", shown).groups()
    assert float(two) == pytest.approx(2 * float(one), rel=0.01) and none == "-"
    assert re.search(r"rank-hours \(no GPU\) +- +- +\d", shown)


def test_a_log_of_an_older_release(runs: Runs, tmp_path: Path, aura_says: Aura) -> None:
    old = damaged(runs[1], tmp_path / "old", "training_log.csv", r"(?m),[^,\n]*$", "")
    shown = aura_says("compare", str(runs[0]), str(old))
    assert "old has no bits per byte yet" in shown and "reaches" not in shown
    assert re.search(r"validation loss \(nats per token\) +\d\S+ +\d", shown)


def test_what_is_no_run_is_said(runs: Runs, tmp_path: Path, aura_says: Aura) -> None:
    damaged(runs[1], tmp_path / "begun", "training_log.csv", r"(?s)\n.*", "\n")
    damaged(runs[1], tmp_path / "broken", "model_config.json", "parameters", "p")
    damaged(runs[1], tmp_path / "strange", "training_log.csv", "40,1", "forty,1")
    for name, code, sentence in (
        ("nothing", 64, "is no run: it has no model_config.json"),
        ("begun", 64, "has no row in training_log.csv yet: a run has one"),
        ("broken", 65, "cannot be read as a run: KeyError('parameters')"),
        ("strange", 65, "cannot be read as a run"),
    ):
        assert sentence in aura_says("compare", str(runs[0]), str(tmp_path / name), code=code)
    assert "Two runs or more" in aura_says("compare", str(runs[0]), code=64)
