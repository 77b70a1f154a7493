"""Several sources in one corpus, each with its part of the tokens."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from aura.commands.prepare import main
from aura.corpus import encode, work
from aura.corpus.corpus import Corpus, verify
from aura.corpus.mixture import Mixture, Part
from aura.corpus.prepare import build
from aura.corpus.shards import Workplace
from aura.corpus.sources import HubDataset, LocalFiles
from aura.corpus.work import Settings
from aura.errors import ConfigError, DataError
from pyarrow import parquet
from spanish import english_in
from test_prepare import documents_of
from test_prepare_resume import content, stopped_at, take_steps


def write_part(file: Path, word: str, documents: int, longest: int, seed: int) -> Path:
    """Documents of all lengths, with broken lines and empty ones among them."""
    draw = random.Random(seed)
    rows = []
    for number in range(documents):
        numbers = [number, *(draw.randrange(1000) for _ in range(draw.randrange(longest)))]
        rows.append(json.dumps({"text": f"{word} {' '.join(map(str, numbers))}"}))
        rows += ["broken"] * (number == 40) + [""] * (number % 97 == 5)
    file.write_text("\n".join(rows))
    return file


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Path]:
    """Tokens cost unlike numbers of characters in them, documents are of unlike lengths, and the second is used up."""
    return {
        "largo": write_part(tmp_path / "largo.jsonl", "largo", 3000, 120, 1),
        "corto": write_part(tmp_path / "corto.jsonl", "otro" * 9, 1500, 9, 2),
    }


def mixture(parts: dict[str, Path], *weights: float) -> Mixture:
    named = zip(parts.items(), weights, strict=True)
    return Mixture([Part(name, weight, LocalFiles([file])) for (name, file), weight in named])


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    take_steps(monkeypatch, chars=3000, tokens=20_000)


SETTINGS = Settings(vocab_size=300, validation_fraction=0.1, max_errors=1)


def shares(corpus: Corpus) -> dict[str, float]:
    total = sum(corpus.tokens.values())
    return {part["name"]: part["tokens"] / total for part in corpus.source["parts"]}


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("max_tokens", [None, 60_000])
@pytest.mark.parametrize("weight", [0.9, 0.7])
def test_every_part_has_its_weight_of_the_tokens(
    parts: dict[str, Path], tmp_path: Path, weight: float, max_tokens: int | None
) -> None:
    settings = Settings(300, 0.1, max_errors=1, max_tokens=max_tokens)
    corpus = build(mixture(parts, weight, 1 - weight), tmp_path / "c", settings)
    total = sum(corpus.tokens.values())
    assert total > 50_000
    # Off by less than a document of 120 tokens: in a corpus that is worth the name, much less than one in a thousand.
    assert shares(corpus) == pytest.approx({"largo": weight, "corto": 1 - weight}, abs=120 / total)
    # What meta.json says of the parts is what the corpus has.
    documents = documents_of(corpus, "train") + documents_of(corpus, "validation")
    first = [document for document in documents if document.startswith("largo")]
    asked = [(part["name"], part["weight"], part["documents"]) for part in corpus.source["parts"]]
    assert asked == [("largo", weight, len(first)), ("corto", 1 - weight, len(documents) - len(first))]
    assert sum(part["tokens"] for part in corpus.source["parts"]) == sum(corpus.tokens.values())


@pytest.mark.usefixtures("small_steps")
def test_the_weights_hold_everywhere_and_nothing_is_lost(parts: dict[str, Path], tmp_path: Path) -> None:
    corpus = build(mixture(parts, 0.9, 0.1), tmp_path / "c", SETTINGS)
    ids = np.concatenate([np.fromfile(corpus.path / entry["name"], "<u2") for entry in corpus.files["train"]])
    end = json.loads((corpus.path / "meta.json").read_text())["end_of_text_id"]
    lengths = np.diff(np.flatnonzero(ids == end), prepend=-1)
    texts = documents_of(corpus, "train")
    of_first = np.cumsum(lengths * np.array([text.startswith("largo") for text in texts]))
    # One document in ten is for validation, so this is not exact.
    error = of_first / np.cumsum(lengths) - 0.9
    assert abs(error[len(error) // 4 :]).max() < 0.02
    for file in parts.values():
        rows = [json.loads(row)["text"] for row in file.read_text().splitlines() if row.startswith("{")]
        taken = {*texts, *documents_of(corpus, "validation")}
        count = sum(row in taken for row in rows)
        assert set(rows[:count]) <= taken  # in their order, none left out


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("max_tokens", [None, 70_000])
def test_interrupted_anywhere_and_with_more_workers_it_ends_with_the_same_bytes(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None
) -> None:
    def settings(workers: int = 1) -> Settings:
        return Settings(300, 0.1, max_errors=1, max_tokens=max_tokens, workers=workers)

    whole = build(mixture(parts, 0.9, 0.1), tmp_path / "whole", settings())
    assert len(whole.files["train"]) > 2
    assert whole.skipped["broken"] == 2
    build(mixture(parts, 0.9, 0.1), tmp_path / "two", settings(workers=2))
    assert content(tmp_path / "two") == content(tmp_path / "whole")
    for journal in (1, 2, 5, 9):
        with stopped_at(journal, monkeypatch):
            build(mixture(parts, 0.9, 0.1), tmp_path / "c", settings())
        done = json.loads(Workplace(tmp_path / "c").journal.read_text())
        assert any(part["given"] for part in done["position"])  # in the middle of a batch
    build(mixture(parts, 0.9, 0.1), tmp_path / "c", settings())
    assert content(tmp_path / "c") == content(tmp_path / "whole")


@pytest.mark.usefixtures("small_steps")
def test_what_is_left_out_is_the_same_after_an_interruption_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind the last journal, after which the batches of a part may never be read again."""
    for name, longest, every in (("largo", 60, 3), ("corto", 20, 2)):
        rows = write_part(tmp_path / f"{name}.jsonl", name, 400, longest, every).read_text().splitlines()
        broken = [f"{row}\nbroken" if number % every == 0 else row for number, row in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(broken))
    named = {name: tmp_path / f"{name}.jsonl" for name in ("largo", "corto")}
    settings = Settings(300, 0.1, max_errors=1000, max_tokens=9900)  # that are reached so
    original = Workplace.write_journal
    with patch.object(Workplace, "write_journal", autospec=True, side_effect=original) as written:
        whole = build(mixture(named, 0.6, 0.4), tmp_path / "whole", settings)
    assert written.call_count > 3
    for journal in range(1, written.call_count + 1):
        output = tmp_path / str(journal)
        with stopped_at(journal, monkeypatch):
            build(mixture(named, 0.6, 0.4), output, settings)
        assert build(mixture(named, 0.6, 0.4), output, settings).skipped == whole.skipped
        assert content(output) == content(tmp_path / "whole")


@pytest.mark.usefixtures("small_steps")
def test_datasets_and_files_mix_and_go_on(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position of `datasets` among the others."""
    texts = [f"del conjunto {number} " * (number % 9 + 1) for number in range(500)]
    (tmp_path / "hub").mkdir()
    parquet.write_table(pa.table({"text": texts}), tmp_path / "hub/train-0.parquet", row_group_size=50)

    def three() -> Mixture:
        hub = HubDataset(str(tmp_path / "hub"), None, "train", "text")
        return Mixture([Part("hub", 0.25, hub), *mixture(parts, 0.7, 0.05).parts])

    build(three(), tmp_path / "whole", SETTINGS)
    for journal in (2, 5):
        with stopped_at(journal, monkeypatch):
            build(three(), tmp_path / "c", SETTINGS)
    corpus = build(three(), tmp_path / "c", SETTINGS)
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    assert shares(corpus) == pytest.approx({"hub": 0.25, "largo": 0.7, "corto": 0.05}, abs=0.003)


def test_little_waits_in_memory_whatever_the_weights(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are read are soon written, though the parts' characters and tokens differ."""
    monkeypatch.setattr(work, "BATCH_CHARS", 1000)
    encoded, write = encode.Encoder.__call__, work.Work._write
    waiting = most = 0

    def counting(encoder: encode.Encoder, texts: list[str]) -> encode.Encoded:
        nonlocal waiting
        waiting += len(texts)
        return encoded(encoder, texts)

    def writing(self: work.Work, part: encode.Encoded, limit: int | None) -> bool:
        nonlocal waiting, most
        waiting -= len(part.lengths)
        most = max(most, waiting)
        return write(self, part, limit)

    monkeypatch.setattr(encode.Encoder, "__call__", counting)
    monkeypatch.setattr(work.Work, "_write", writing)
    build(mixture(parts, 0.9, 0.1), tmp_path / "c", SETTINGS)
    assert 0 < most < 100  # of 4500 documents


def test_a_part_that_is_used_up_ends_the_mixture_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AURA_LANG", "es")
    for name, documents in (("spanish", 300), ("english", 3000)):
        (tmp_path / name).mkdir()
        write_part(tmp_path / name / "text.jsonl", name, documents, 50, 3)
    words = ["--dataset", f"{tmp_path}/spanish=0.7", f"{tmp_path}/english=0.3", "--output", f"{tmp_path}/c"]
    for _ in range(2):
        assert main([*words, "--max-errors", "1"]) == 0
        corpus = verify(tmp_path / "c")
        assert shares(corpus) == pytest.approx({"spanish": 0.7, "english": 0.3}, abs=0.005)
        spanish, _ = corpus.source["parts"]
        assert spanish["documents"] == 300
    said = " ".join(capsys.readouterr().out.replace(str(tmp_path), "").split())
    used_up = re.findall(r"Nota: (\S+) se ha agotado tras (\S+) tokens", said)
    assert used_up == [("spanish", f"{spanish['tokens']:,}")], said
    assert "/c está al día." in said
    assert "No se ha dado --vocab-size: 49,152 ids de token." in said
    assert not english_in(said.replace("english", "").replace("spanish", "")), said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["c4", "wikipedia"], "'c4' has none"),
        (["c4=0.5", "wikipedia"], "'wikipedia' has none"),
        (["c4=some"], "'c4=some' has none"),
        (["c4=0", "wikipedia=1"], "'c4=0' has none"),
        (["c4=nan", "wikipedia=1"], "'c4=nan' has none"),
        (["c4=0.5", "wikipedia=0.3"], "must make 1; these make 0.8"),
        (["c4=0.5", "wikipedia=0.5", "--dataset-config", "es"], "--dataset-config belongs to one dataset"),
        (["c4=0.5", "wikipedia=0.5", "--dataset-revision", "a"], "--dataset-revision belongs to one dataset"),
        (["{tmp_path}=0.5", "c4=0.5"], "lies in the input"),
    ],
)
def test_mixtures_that_are_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    words = [word.format(tmp_path=tmp_path) for word in words]
    with pytest.raises(ConfigError, match=sentence):
        main(["--dataset", *words, "--output", str(tmp_path / "c")])
    assert list(tmp_path.iterdir()) == []


def test_too_many_broken_places_end_a_mixture(parts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"largo\.jsonl, line \d+ is not JSON"):
        build(mixture(parts, 0.9, 0.1), tmp_path / "c", Settings(300))


def test_what_is_left_out_counts_also_in_a_batch_that_is_not_written_whole_and_behind_the_last_document(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_part(first, "first", 30, 9, 1)  # "" behind the sixth
    write_part(second, "second", 300, 9, 2)  # "" behind the sixth and three more; a broken one
    first.write_text(first.read_text() + "\n\n \nbroken\n")
    made = build(mixture({"first": first, "second": second}, 0.5, 0.5), tmp_path / "c", SETTINGS)
    assert made.source["parts"][0]["documents"] == 30
    assert made.source["parts"][1]["documents"] < 60
    assert made.skipped == {"broken": 2, "empty": 3 + 4}


def test_newer_commits_of_a_mixture_are_named(tmp_path: Path) -> None:
    output = tmp_path / "c"

    def request(*commits: str, tokens: int = 5) -> dict[str, Any]:
        named = zip(("a/es", "a/en"), commits, strict=True)
        hub = [{"weight": 0.5, "dataset": name, "revision": commit} for name, commit in named]
        return {"mixture": [*hub, {"weight": 0.1, "sha256": "0"}], "max_tokens": tokens}

    place = Workplace(output)
    place.corpus.mkdir(parents=True)
    place.write_journal({"request": request("1", "2")})
    assert place.read_journal(request("1", "2"))
    with pytest.raises(ConfigError, match=r"with those, a/en@2, or remove"):
        place.read_journal(request("1", "3"))
    with pytest.raises(ConfigError, match="other text or settings"):
        place.read_journal(request("1", "3", tokens=6))


def test_names_of_files_that_are_no_utf8_are_printed_and_written(
    parts: dict[str, Path], tmp_path: Path
) -> None:
    odd = os.fsdecode(b"espa\xf1a.jsonl")
    (tmp_path / "texts").mkdir()
    file = parts["corto"].rename(tmp_path / "texts" / odd)
    (tmp_path / "texts" / os.fsdecode(b"espa\xf1a.jpg")).touch()
    assert Mixture([Part(odd, 1.0, LocalFiles([file]))]).parts[0].name == "espa?a.jsonl"
    words = ["prepare", "--input", tmp_path / "texts", "--output", tmp_path / "c"]
    words += ["--vocab-size", "300", "--max-errors", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "aura", *words], env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "espa\\udcf1a.jpg is one" in done.stdout
