"""Several sources in one corpus, each with its share of the text."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from aura.commands.prepare import main
from aura.corpus.corpus import verify
from aura.corpus.mixture import Mixture, Part
from aura.corpus.prepare import build
from aura.corpus.shards import Workplace
from aura.corpus.sources import HubDataset, LocalFiles
from aura.corpus.work import Settings
from aura.errors import ConfigError
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


SETTINGS = Settings(vocab_size=300, validation_fraction=0.1, max_errors=2)


def size_of(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("max_tokens", [None, 60_000])
def test_every_part_has_its_share_of_the_text_everywhere_and_nothing_is_lost(
    parts: dict[str, Path], tmp_path: Path, max_tokens: int | None
) -> None:
    corpus = build(mixture(parts, 9, 1), tmp_path / "c", replace(SETTINGS, max_tokens=max_tokens))
    train, validation = documents_of(corpus, "train"), documents_of(corpus, "validation")
    first = [text for text in train + validation if text.startswith("largo")]
    longest = max(map(len, first))
    assert abs(size_of(first) - 0.9 * corpus.text_bytes) < longest
    sizes = np.array([len(text) for text in train])
    of_first = np.cumsum(sizes * [text.startswith("largo") for text in train]) / np.cumsum(sizes)
    # One document in ten is for validation, so this is not exact.
    assert abs(of_first[len(train) // 4 :] - 0.9).max() < 0.02
    for file in parts.values():
        rows = [json.loads(row)["text"] for row in file.read_text().splitlines() if row.startswith("{")]
        taken = [row in {*train, *validation} for row in rows]
        assert taken == sorted(taken, reverse=True)  # in their order, none left out
    named = [(part["name"], part["weight"]) for part in corpus.source["parts"]]
    assert named == [("largo", 0.9), ("corto", 0.1)]
    assert sum(part["tokens"] for part in corpus.source["parts"]) == sum(corpus.tokens.values())


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("max_tokens", [None, 70_000])
def test_interrupted_anywhere_and_with_more_workers_it_ends_with_the_same_bytes(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None
) -> None:
    settings = replace(SETTINGS, max_tokens=max_tokens)
    whole = build(mixture(parts, 0.9, 0.1), tmp_path / "whole", settings)
    assert len(whole.files["train"]) > 2
    assert whole.skipped["broken"] == 2 and whole.skipped["empty"] > 5
    build(mixture(parts, 0.9, 0.1), tmp_path / "two", replace(settings, workers=2))
    assert content(tmp_path / "two") == content(tmp_path / "whole")
    for journal in (1, 2, 5, 9):
        with stopped_at(journal, monkeypatch):
            build(mixture(parts, 0.9, 0.1), tmp_path / "c", settings)
    build(mixture(parts, 0.9, 0.1), tmp_path / "c", settings)
    assert content(tmp_path / "c") == content(tmp_path / "whole")


@pytest.mark.usefixtures("small_steps")
def test_datasets_and_files_mix_and_go_on(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position of `datasets` among the others."""
    texts = [f"del conjunto {number} " * (number % 9 + 1) for number in range(500)]
    (tmp_path / "hub").mkdir()
    parquet.write_table(pa.table({"text": texts}), tmp_path / "hub/train-0.parquet", row_group_size=50)

    def both() -> Mixture:
        hub = HubDataset(str(tmp_path / "hub"), None, "train", "text")
        return Mixture([Part("hub", 0.7 / 3, hub), Part("largo", 0.7, LocalFiles([parts["largo"]]))])

    build(both(), tmp_path / "whole", SETTINGS)
    for journal in (2, 5):
        with stopped_at(journal, monkeypatch):
            build(both(), tmp_path / "c", SETTINGS)
    corpus = build(both(), tmp_path / "c", SETTINGS)
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    of_hub = [
        text
        for split in ("train", "validation")
        for text in documents_of(corpus, split)
        if text.startswith("del")
    ]
    assert size_of(of_hub) == pytest.approx(0.25 * corpus.text_bytes, rel=0.01)


def test_a_part_that_is_used_up_ends_the_mixture_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AURA_LANG", "es")
    for name, documents in (("spanish", 300), ("english", 3000)):
        (tmp_path / name).mkdir()
        write_part(tmp_path / name / "text.jsonl", name, documents, 50, 3)
    words = ["--dataset", f"{tmp_path}/spanish=0.7", f"{tmp_path}/english=0.3", "--output", f"{tmp_path}/c"]
    for _ in range(2):
        assert main([*words, "--max-errors", "2"]) == 0
        corpus = verify(tmp_path / "c")
        texts = documents_of(corpus, "train") + documents_of(corpus, "validation")
        spanish = [text for text in texts if text.startswith("spanish")]
        assert len(spanish) == 300
        assert size_of(spanish) == pytest.approx(0.7 * corpus.text_bytes, rel=0.01)
    said = " ".join(capsys.readouterr().out.replace(str(tmp_path), "").split())
    used_up = re.findall(r"Nota: (\S+) se ha agotado tras (\S+) MB de texto", said)
    assert used_up == [("spanish", f"{size_of(spanish) / 1e6:.1f}")], said
    assert "/c está al día." in said
    assert "No se ha dado --vocab-size: 49,152 ids de token." in said
    assert not english_in(said.replace("english", "").replace("spanish", "")), said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fineweb2-es", "wikipedia"], "'fineweb2-es' has none"),
        (["fineweb2-es=0.5", "wikipedia"], "'wikipedia' has none"),
        (["fineweb2-es=0", "wikipedia=1"], "'fineweb2-es=0' has none"),
        (["fineweb2-es=nan", "wikipedia=1"], "'fineweb2-es=nan' has none"),
        (
            ["fineweb2-es=0.5", "wikipedia=0.5", "--dataset-config", "es"],
            "--dataset-config belongs to one dataset",
        ),
        (
            ["fineweb2-es=0.5", "wikipedia=0.5", "--dataset-revision", "a"],
            "--dataset-revision belongs to one dataset",
        ),
    ],
)
def test_mixtures_that_are_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    words = [word.format(tmp_path=tmp_path) for word in words]
    with pytest.raises(ConfigError, match=sentence):
        main(["--dataset", *words, "--output", str(tmp_path / "c")])
    assert list(tmp_path.iterdir()) == []


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
    assert Mixture([Part(odd, 1.0, LocalFiles([file]))]).parts == ("espa?a.jsonl",)
    words = ["prepare", "--input", tmp_path / "texts", "--output", tmp_path / "c"]
    words += ["--vocab-size", "300", "--max-errors", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "aura", *words], env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "espa\\udcf1a.jpg is one" in done.stdout
