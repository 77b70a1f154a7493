"""A document that occurs twice is written once, whoever writes and however often that is interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from aura.corpus.corpus import Corpus, fingerprint_of
from aura.corpus.prepare import build
from aura.corpus.shards import Workplace
from aura.corpus.sources import LocalFiles
from aura.corpus.work import Settings
from aura.errors import DataError
from conftest import Aura
from test_prepare import documents_of
from test_prepare_resume import content, stopped_at, take_steps

SETTINGS = Settings(vocab_size=300, validation_fraction=0.1)
TEXTS = [f"documento {number} " + "con más palabras " * (number % 7) for number in range(300)]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def twice(path: Path) -> Path:
    """Every third document occurs again: some at once, some far behind, one three times."""
    near = [text for number, text in enumerate(TEXTS) for text in [text] * (2 if number % 6 == 0 else 1)]
    return write(path, [*near, *TEXTS[3::6], TEXTS[0]])


def everything(corpus: Corpus) -> list[str]:
    return sorted(documents_of(corpus, "train") + documents_of(corpus, "validation"))


def test_each_is_written_once_and_how_many_were_left_out_is_said(tmp_path: Path, aura_says: Aura) -> None:
    words = ["prepare", "--input", str(twice(tmp_path / "a.jsonl")), "--vocab-size", "300"]
    said = aura_says(*words, "--output", str(tmp_path / "c"))
    assert "Left out: 101 documents that had occurred before" in said
    corpus = build(LocalFiles([tmp_path / "a.jsonl"]), tmp_path / "c", Settings(300))
    assert everything(corpus) == sorted(text.strip() for text in TEXTS)
    assert corpus.source["duplicates"] == 101 and corpus.source["documents"] == 300
    assert corpus.text_bytes == sum(len(text.strip().encode()) for text in TEXTS)


def test_where_there_are_none_the_fingerprint_has_no_word_of_it(tmp_path: Path) -> None:
    corpus = build(LocalFiles([write(tmp_path / "a.jsonl", TEXTS)]), tmp_path / "c", SETTINGS)
    meta = json.loads((corpus.path / "meta.json").read_text())
    assert "duplicates" not in meta["source"] and fingerprint_of(meta) == corpus.fingerprint


def test_those_that_are_left_out_count_for_no_limit(tmp_path: Path) -> None:
    limit = replace(SETTINGS, max_tokens=2000)
    corpus = build(LocalFiles([twice(tmp_path / "a.jsonl")]), tmp_path / "c", limit)
    taken = everything(corpus)
    assert taken == sorted(text.strip() for text in TEXTS[: len(taken)]) and len(taken) > 50
    assert 2000 <= sum(corpus.tokens.values()) < 2050


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_it_knows_what_it_has_written(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_steps(monkeypatch, chars=1500, tokens=2000)
    file, settings = twice(tmp_path / "a.jsonl"), replace(SETTINGS, workers=workers)
    whole = build(LocalFiles([file]), tmp_path / "whole", settings)
    assert whole.source["duplicates"] == 101
    for journal in (1, 3, 4):
        with stopped_at(journal, monkeypatch):
            build(LocalFiles([file]), tmp_path / "c", settings)
        with Workplace(tmp_path / "c").hashes.open("ab") as hashes:
            hashes.write(b"\1" * 12)  # on their way when the power went
    build(LocalFiles([file]), tmp_path / "c", settings)
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_a_file_of_hashes_that_lacks_some_is_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_steps(monkeypatch, chars=1500, tokens=2000)
    file = twice(tmp_path / "a.jsonl")
    with stopped_at(2, monkeypatch):
        build(LocalFiles([file]), tmp_path / "c", SETTINGS)
    hashes = Workplace(tmp_path / "c").hashes
    hashes.write_bytes(hashes.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"journal\.hashes is shorter than its journal says: remove"):
        build(LocalFiles([file]), tmp_path / "c", SETTINGS)
