from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aura.commands.prepare import main
from aura.corpus import corpus as corpora
from aura.corpus import running_text
from aura.corpus.corpus import Corpus, verify
from aura.corpus.prepare import build
from aura.corpus.shards import workplace
from aura.corpus.sources import LocalFiles
from aura.corpus.work import Settings
from aura.errors import ConfigError, DataError
from conftest import flip_a_bit, prepare
from tokenizers import Tokenizer


def token_ids(corpus: Corpus, split: str) -> list[int]:
    return [
        int(i) for entry in corpus.files[split] for i in np.fromfile(corpus.path / entry["name"], dtype="<u2")
    ]


def documents_of(corpus: Corpus, split: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(corpus.path / corpora.TOKENIZER))
    end = tokenizer.token_to_id(corpora.END_OF_TEXT)
    documents: list[list[int]] = [[]]
    for token in token_ids(corpus, split):
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []  # the last document ends with the mark too
    return [tokenizer.decode(ids) for ids in documents]


def refuse(sentence: str) -> None:
    raise AssertionError(sentence)


def read_documents(file: Path) -> Iterator[str]:
    with file.open("rb") as stream:
        yield from running_text.read_documents(file, stream, refuse)


def test_every_document_is_in_one_split_and_comes_back_as_it_was(corpus: Corpus, text: Path) -> None:
    train, validation = documents_of(corpus, "train"), documents_of(corpus, "validation")
    assert sorted(train + validation) == sorted(read_documents(text))
    assert not set(train) & set(validation)
    assert len(train) > len(validation) > 0


def test_meta_is_true(corpus: Corpus) -> None:
    assert verify(corpus.path) == corpus
    ids = token_ids(corpus, "train")
    assert corpus.tokens["train"] == len(ids)
    counts = Counter(ids)
    entropy = -sum(n / len(ids) * math.log(n / len(ids)) for n in counts.values())
    assert corpus.unigram_entropy == pytest.approx(entropy, rel=1e-12)
    assert corpus.vocab_size == 300 > max(ids)


def test_the_same_text_gives_the_same_bytes_whatever_the_file_is_called(
    corpus: Corpus, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "otro.txt").write_bytes(text.read_bytes())
    again = prepare([tmp_path / "otro.txt"], tmp_path / "corpus", 300, 0.1)
    assert again.fingerprint == corpus.fingerprint
    for file in corpus.path.iterdir():
        assert (again.path / file.name).read_bytes() == file.read_bytes()


def test_what_is_up_to_date_is_left_alone_and_what_is_not_is_not_overwritten(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--input", str(text), "--output", str(tmp_path / "c"), "--vocab-size", "300"]
    assert main(words) == 0
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "c").iterdir()}
    capsys.readouterr()
    assert main(words) == 0
    assert "up to date" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "c").iterdir()} == before
    with pytest.raises(DataError, match="other text or settings"):
        prepare([text], tmp_path / "c", 301)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    with pytest.raises(DataError, match="not a corpus"):
        prepare([text], tmp_path / "mine", 300)


def test_damage_is_found(text: Path, tmp_path: Path) -> None:
    made = prepare([text], tmp_path / "c", 300)
    shard, meta = made.path / "train-00000.bin", made.path / "meta.json"
    flip_a_bit(shard)
    assert corpora.read_corpus(made.path) == made  # a quick look sees sizes only
    with pytest.raises(DataError, match=r"train-00000\.bin is damaged"):
        verify(made.path)
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="bytes instead of"):
        corpora.read_corpus(made.path)
    another = json.dumps({**json.loads(meta.read_text()), "vocab_size": 299})
    for content, sentence in (
        (another, "own fingerprint"),
        ("[]", r"meta\.json has format None"),
        ("{", r"meta\.json is damaged"),
        ("\udcff", r"meta\.json is damaged"),
    ):
        meta.write_text(content, errors="surrogateescape")
        with pytest.raises(DataError, match=sentence):
            corpora.read_corpus(made.path)
    with pytest.raises(DataError, match="no corpus in"):
        corpora.read_corpus(tmp_path)


@pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 20])
def test_documents_do_not_depend_on_how_the_file_is_read(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.txt"
    paragraphs = [f"párrafo {i} " + "ñandú " * (i % 40) for i in range(100)]
    separators = ["\n\n", "\r\n\r\n", "\n \t\n\n  "]
    file.write_bytes("".join(p + separators[i % 3] for i, p in enumerate(paragraphs)).encode())
    monkeypatch.setattr(running_text, "DOCUMENT_CHARS", 300)
    monkeypatch.setattr(running_text, "LONGEST_DOCUMENT", 2000)
    expected = list(read_documents(file))
    monkeypatch.setattr(running_text, "CHUNK", chunk)
    assert list(read_documents(file)) == expected
    assert " ".join(" ".join(expected).split()) == " ".join(" ".join(paragraphs).split())
    assert all(300 <= len(document) < 700 for document in expected[:-1])


def test_text_without_blank_lines_is_cut_at_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_text, "DOCUMENT_CHARS", 300)
    monkeypatch.setattr(running_text, "LONGEST_DOCUMENT", 1000)
    file = tmp_path / "t.txt"
    file.write_text("palabra " * 1000)
    documents = list(read_documents(file))
    assert all(len(document) <= 1000 for document in documents)
    assert " ".join(documents).split() == ["palabra"] * 1000


def test_the_end_mark_inside_a_text_is_text(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text(f"antes {corpora.END_OF_TEXT} después\n\n" * 3 + text.read_text())
    made = prepare([file], tmp_path / "c", 300)
    meta = json.loads((made.path / "meta.json").read_text())
    assert len(documents_of(made, "train")) == meta["documents"]["train"]


def refused(inputs: list[Path], tmp_path: Path, vocab_size: int = 300) -> str:
    """The sentence; and nothing may be left behind."""
    before = set(tmp_path.rglob("*"))
    with pytest.raises((DataError, ConfigError)) as caught:
        prepare(inputs, tmp_path / "c", vocab_size)
    assert set(tmp_path.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refused_input(text: Path, tmp_path: Path) -> None:
    empty, blank, short = tmp_path / "empty.txt", tmp_path / "blank.txt", tmp_path / "short.txt"
    empty.touch()
    blank.write_text(" \n\n \t\n")
    short.write_text("hola")
    (tmp_path / "folder").mkdir()
    assert f"{empty} is empty" in refused([empty], tmp_path)
    assert "no text in" in refused([blank], tmp_path)
    assert "too little text" in refused([short], tmp_path)
    assert "does not exist" in refused([tmp_path / "missing"], tmp_path)
    assert "no .txt, .jsonl or .parquet file" in refused([tmp_path / "folder"], tmp_path)
    assert "--vocab-size 256" in refused([text], tmp_path, 256)
    assert "--vocab-size 65537" in refused([text], tmp_path, 65537)


def test_a_link_to_an_empty_directory_leads_there(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "there")
    assert prepare([text], tmp_path / "c", 300, 0.1).fingerprint == corpus.fingerprint
    assert sorted(tmp_path.iterdir()) == [tmp_path / "c", tmp_path / "there"]
    assert verify(tmp_path / "there").fingerprint == corpus.fingerprint


def test_the_directory_of_another_is_not_touched(text: Path, tmp_path: Path) -> None:
    """That happens to have the name in which the work is done; also what is put in there meanwhile."""
    letter = tmp_path / "c.partial/corpus/letter"
    letter.parent.mkdir(parents=True)
    letter.write_text("mine")
    taken = r"c\.partial, in which the work would be done, holds something else"
    with pytest.raises(ConfigError, match=taken):
        prepare([text], tmp_path / "c", 300)
    (tmp_path / "f.partial").write_text("mine")
    with pytest.raises(DataError, match=r"f\.partial: File exists\. Nothing was left"):
        prepare([text], tmp_path / "f", 300)
    letter.rename(tmp_path / "letter")
    letter.parent.rmdir()
    prepare([text], tmp_path / "c", 300)  # empty, it may be anybody's
    letter.parent.mkdir(parents=True)
    (tmp_path / "letter").rename(letter)
    prepare([text], tmp_path / "c", 300)
    assert letter.read_text() == "mine"
    with workplace(tmp_path / "d", print) as place:
        (place.path / "letter").write_text("mine")
        place.start_again()
        place.finish()
    assert [path.name for path in place.path.iterdir()] == ["letter"]


def test_what_no_rename_can_replace_is_refused_at_once(
    text: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place where something is mounted, and the directory of who types."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    gone = tmp_path / "t.txt"
    for output in (small_disk, Path()):
        gone.write_bytes(text.read_bytes())
        source = LocalFiles([gone])
        gone.unlink()  # nobody reads it
        with pytest.raises(ConfigError, match="choose a directory in it, such as"):
            build(source, output, Settings(300))
        assert not any(output.iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(text: Path, small_disk: Path) -> None:
    with pytest.raises(DataError, match="is full"):
        prepare([text], small_disk / "c", 300)
    assert list(small_disk.iterdir()) == []
