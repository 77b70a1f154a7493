"""`aura prepare --clean`: what goes, what is said of it, and that datatrove itself would say the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aura.commands.cleaning import unwanted
from aura.commands.prepare import main
from aura.corpus import corpus as corpora
from aura.corpus import shards, work
from aura.corpus.cleaned import Cleaned
from aura.corpus.corpus import Corpus
from aura.corpus.prepare import build
from aura.corpus.sources import LocalFiles
from aura.corpus.work import Settings
from aura.errors import ConfigError, DataError
from test_prepare import documents_of
from test_prepare_resume import content, stopped_at

SETTINGS = Settings(vocab_size=300, validation_fraction=0.1, max_errors=1)


def write(file: Path, texts: list[str]) -> Path:
    rows = [json.dumps({"text": text}) for text in texts]
    file.write_text("\n".join([*rows[:30], "broken", "", *rows[30:]]))
    return file


@pytest.fixture
def texts() -> list[str]:
    """Every tenth has come before, every seventh is bad."""
    numbers = [number - 5 if number % 10 == 9 else number for number in range(300)]
    return [f"texto {number} {'malo' if number % 7 == 1 else 'bueno'} de la señora" for number in numbers]


class Bad:
    """A cleaner that removes what has the word in it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, documents: Iterator[tuple[int, str]], folder: Path) -> Iterator[tuple[int, str, str]]:
        self.calls += 1
        assert folder.is_dir()
        for number, text in documents:
            if "malo" in text:
                yield number, "bad", text


def cleaned(file: Path, output: Path, cleaner: Bad, **settings: int) -> Cleaned:
    return Cleaned(LocalFiles([file]), output.with_name(f"{output.name}.removed.json"), cleaner, settings)


def everything(corpus: Corpus) -> list[str]:
    return sorted(documents_of(corpus, "train") + documents_of(corpus, "validation"))


def test_what_occurs_twice_and_what_the_cleaner_names_goes_and_is_written_down(
    texts: list[str], tmp_path: Path
) -> None:
    file, cleaner = write(tmp_path / "a.jsonl", texts), Bad()
    corpus = build(cleaned(file, tmp_path / "c", cleaner), tmp_path / "c", SETTINGS)
    kept = [text for text in dict.fromkeys(texts) if "malo" not in text]
    assert everything(corpus) == sorted(kept)
    assert corpus.skipped == {"broken": 1, "empty": 1}
    bad = [number for number, text in enumerate(texts) if "malo" in text and texts.index(text) == number]
    twice = list(range(9, 300, 10))
    assert corpus.source["removed"] == {"bad": len(bad), "exact_duplicate": 30}
    assert "de la señora" in (tmp_path / "c.removed.json").read_text()
    record = json.loads((tmp_path / "c.removed.json").read_text())
    assert record["removed"] == {"bad": bad, "exact_duplicate": twice}
    assert record["examples"]["bad"] == [texts[number] for number in bad[:10]]
    assert record["examples"]["exact_duplicate"] == [texts[number] for number in twice[:10]]
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "c", "c.removed.json"}


def test_it_is_looked_at_once_and_anew_where_text_or_settings_differ(
    texts: list[str], tmp_path: Path
) -> None:
    file, cleaner, output = write(tmp_path / "a.jsonl", texts), Bad(), tmp_path / "c"
    corpus = build(cleaned(file, output, cleaner), output, SETTINGS)
    assert build(cleaned(file, output, cleaner), output, SETTINGS) == corpus
    assert cleaner.calls == 1
    with pytest.raises(DataError, match="other text or settings"):
        build(LocalFiles([file]), output, SETTINGS)
    (output / corpora.META).rename(tmp_path / "meta")
    for path in output.iterdir():
        path.unlink()
    build(cleaned(file, output, cleaner), output, SETTINGS)
    assert cleaner.calls == 1
    assert (output / corpora.META).read_bytes() == (tmp_path / "meta").read_bytes()
    for path in output.iterdir():
        path.unlink()
    build(cleaned(file, output, cleaner, limit=2), output, SETTINGS)
    assert cleaner.calls == 2


def test_interrupted_it_ends_with_the_same_bytes(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "BATCH_CHARS", 300)
    monkeypatch.setattr(shards, "COMMIT_SECONDS", 0)
    file, cleaner, output = write(tmp_path / "a.jsonl", texts), Bad(), tmp_path / "c"
    build(cleaned(file, tmp_path / "whole", cleaner), tmp_path / "whole", SETTINGS)
    for journal in (1, 2, 3):
        with stopped_at(journal, monkeypatch):
            build(cleaned(file, output, cleaner), output, SETTINGS)
    build(cleaned(file, output, cleaner), output, SETTINGS)
    assert content(output) == content(tmp_path / "whole")
    assert cleaner.calls == 2  # once for each output


def test_it_is_for_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--clean is for files"):
        main(["--dataset", "c4", "--clean", "--output", str(tmp_path / "c")])


def test_what_cannot_be_installed_is_one_sentence(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.jsonl", texts)
    (tmp_path / "file").touch()
    monkeypatch.setenv(unwanted.ENVIRONMENT.variable, str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"file: File exists"):
        main(["--input", str(file), "--max-errors", "1", "--clean", "--output", str(tmp_path / "c")])
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "file"}


SPANISH = (
    "casa perro camino ciudad montaña río escuela libro mesa ventana jardín puerta cocina tiempo trabajo familia "
    "amigo historia noche mañana invierno verano música comida viaje pueblo mercado plaza iglesia puente bosque"
).split()


def article(draw: random.Random) -> str:
    """New words in an order of their own, as sentences."""
    sentences = []
    for _ in range(12):
        words = [draw.choice(SPANISH) + draw.choice(["", "s", "cita", "dor"]) for _ in range(9)]
        words[3], words[6] = (
            draw.choice(["de la", "en el", "que", "con una"]),
            draw.choice(["y", "del", "por los"]),
        )
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


@pytest.fixture
def planted() -> dict[str, list[str]]:
    draw = random.Random(1)
    good = [article(draw) for _ in range(60)]
    near = []
    for text in good[:10]:
        words = text.split()
        words[40] = "cambiado"
        near.append(" ".join(words))
    rubbish = ["Compra ahora " * 200, "12 % 34 € 56 - " * 60, "Breve.", "xy zz qq. " * 10 + good[0][:90]]
    return {"good": good, "near": near, "same": good[10:15], "rubbish": rubbish}


@pytest.mark.more
def test_planted_duplicates_and_rubbish_are_found(planted: dict[str, list[str]], tmp_path: Path) -> None:
    """And nothing else, whatever the number of processes and of files."""
    file = write(tmp_path / "a.jsonl", [text for texts in planted.values() for text in texts])
    words = ["--input", str(file), "--max-errors", "1", "--clean", "--vocab-size", "500"]
    assert main([*words, "--workers", "1", "--output", str(tmp_path / "c")]) == 0
    assert everything(corpora.verify(tmp_path / "c")) == sorted(planted["good"])
    removed = json.loads((tmp_path / "c.removed.json").read_text())["removed"]
    assert removed.pop("near_duplicate") == list(range(60, 70))
    assert removed.pop("exact_duplicate") == list(range(70, 75))
    assert sorted(number for numbers in removed.values() for number in numbers) == list(range(75, 79))


@pytest.mark.more
def test_datatrove_ends_with_who_asked_it(tmp_path: Path) -> None:
    draw = random.Random(1)
    file = write(tmp_path / "a.jsonl", [article(draw) for _ in range(5000)])
    unwanted.ENVIRONMENT.python()
    words = [sys.executable, "-m", "aura", "prepare", "--input", str(file), "--max-errors", "1", "--clean"]

    def at_work() -> list[int]:
        found = psutil.process_iter(["cmdline"])
        return [
            one.pid for one in found if str(tmp_path / "c.removed") in " ".join(one.info["cmdline"] or ())
        ]

    def until(true: bool) -> None:
        deadline = time.monotonic() + 60
        while bool(at_work()) != true:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(
            [*words, "--output", str(tmp_path / "c")], stderr=subprocess.DEVNULL
        ) as process:
            until(True)
            process.send_signal(number)
        until(False)
        assert not (tmp_path / "c.removed.json.work/buckets").exists()  # it had not come to its end
    assert not (tmp_path / "c.removed.json").exists()


BY_HAND = """
import json, sys
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
settings, texts = json.load(sys.stdin)
filters = [
    GopherRepetitionFilter(**settings["repetition"], language=settings["language"]),
    GopherQualityFilter(**settings["quality"], language=settings["language"]),
]
def reason(text):
    answers = (one.filter(Document(text=text, id="0")) for one in filters)
    return next((answer[1] for answer in answers if answer is not True), None)
print(json.dumps([reason(text) for text in texts]))
"""


@pytest.mark.more
@pytest.mark.parametrize("chars_per_file", [4_000_000, 3000])
def test_datatrove_called_by_hand_says_the_same(
    planted: dict[str, list[str]], tmp_path: Path, chars_per_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwanted, "CHARS_PER_FILE", chars_per_file)
    texts = planted["rubbish"] + planted["good"][:8]
    found = dict[int, str](
        (number, reason)
        for number, reason, _ in unwanted.found_by_datatrove(iter(enumerate(texts)), tmp_path, workers=2)
    )
    interpreter = unwanted.ENVIRONMENT.python()
    asked = json.dumps([unwanted.SETTINGS, texts])
    said = subprocess.run(
        [str(interpreter), "-c", BY_HAND],
        input=asked,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    expected: list[Any] = json.loads(said.stdout.splitlines()[-1])
    assert found == {number: reason for number, reason in enumerate(expected) if reason}
    assert len(found) == 4
