"""Bits per byte of text: the bytes are those of the validation text. Of a mixture as a whole and by part: in the
corpus, in a validation, and in all that a run writes."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import unicodedata
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from aura.cluster.ranks import Ranks
from aura.config import resolve
from aura.corpus import shards
from aura.corpus.corpus import META, TOKENIZER, Corpus, read_corpus
from aura.corpus.encode import document_hash
from aura.corpus.mixture import Mixture, Part
from aura.corpus.prepare import build
from aura.corpus.sequences import Sequences
from aura.corpus.sources import LocalFiles
from aura.corpus.text_bytes import bits_per_byte
from aura.corpus.work import Settings
from aura.model.family import model_of
from aura.model.forward import validation_loss, validation_windows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_mixture import mixture, write_part
from test_prepare import documents_of, refuse
from test_runlog import rows
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import Trainer, complete, start

SETTINGS = Settings(vocab_size=300, validation_fraction=0.1, max_errors=9)
CPU = torch.device("cpu")
LENGTH = 16


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokens of unlike lengths in them."""
    folder = tmp_path_factory.mktemp("parts")
    return {
        "largo": write_part(folder / "largo.jsonl", "largo", 1500, 80, 1),
        "corto": write_part(folder / "corto.jsonl", "otro" * 9, 1500, 30, 2),
    }


@pytest.fixture(scope="module")
def mixed(parts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build(mixture(parts, 0.7, 0.3), tmp_path_factory.mktemp("mixed") / "c", SETTINGS)


@pytest.fixture(scope="module")
def ranks(mixed: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Trainer]:
    """One alone, and two together."""
    folder = tmp_path_factory.mktemp("ranks")
    one = complete(start(folder / "one", mixed, 1, "--batch-size 4"))
    return [*one, *complete(start(folder / "two", mixed, 2))]


def windows_of(part: str, corpus: Corpus, chosen: np.ndarray) -> np.ndarray:
    """Those of them that begin in its files, which lie one after another."""
    end, found = 0, []
    for entry in corpus.files["validation"]:
        begin, end = end, end + entry["tokens"]
        if entry["part"] == part:
            found += [sequence for sequence in chosen if begin <= sequence * LENGTH < end]
    return np.array(found)


def real_bytes(file: Path, corpus: Corpus) -> int:
    """Of the documents of this file that are for validation, by their hash."""
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    cut = int(corpus.source["validation_fraction"] * 2**64)
    return sum(len(text.encode()) for text in texts if document_hash(text.encode()) <= cut)


def of_one_nat(tokens: int, size: int) -> float:
    return tokens / size / math.log(2)


@pytest.fixture(scope="module")
def decomposed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every accent is a character of its own, which a tokenizer may put together with its letter."""
    words = unicodedata.normalize("NFD", text.read_text(encoding="utf-8")).split()
    rows = [json.dumps({"text": " ".join(words[i : i + 20])}) for i in range(0, len(words), 20)]
    file = tmp_path_factory.mktemp("decomposed") / "nfd.jsonl"
    file.write_text("\n".join(dict.fromkeys(rows)))
    return file


def sentencepiece_of(file: Path, kind: str, path: Path) -> Path:
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([json.loads(line)["text"] for line in file.read_text().splitlines()]),
            model_writer=model, vocab_size=400, model_type=kind, minloglevel=2, num_threads=1, byte_fallback=True,
            hard_vocab_limit=False, normalization_rule_name="nmt_nfkc",
        )  # fmt: skip
    return path


def words_of(file: Path, path: Path) -> Path:
    words = sorted(set(" ".join(json.loads(line)["text"] for line in file.read_text().splitlines()).split()))
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "[UNK]"])}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "bpe", "words"])
def test_bits_per_byte_are_of_the_text_whatever_the_tokenizer_makes_of_it(
    kind: str, decomposed: Path, tmp_path: Path
) -> None:
    settings = Settings(300, 0.1)
    if kind != "byte-level":
        file = tmp_path / ("words.json" if kind == "words" else f"{kind}.model")
        make = words_of(decomposed, file) if kind == "words" else sentencepiece_of(decomposed, kind, file)
        settings = Settings(None, 0.1, tokenizer=str(make))
    corpus = build(LocalFiles([decomposed]), tmp_path / "c", settings)
    bits = bits_per_byte(corpus, refuse)
    expected = of_one_nat(corpus.tokens["validation"], real_bytes(decomposed, corpus))
    assert bits.whole == pytest.approx(expected, rel=1e-12) and bits.parts == {}
    whole = [json.loads(line)["text"] for line in decomposed.read_text(encoding="utf-8").splitlines()]
    assert corpus.text_bytes == sum(len(text.encode()) for text in whole)


def of_earlier_release(corpus: Corpus, path: Path) -> Corpus:
    """The same text and settings, without the bytes of each file; its fingerprint is that of all that is there."""
    shutil.copytree(corpus.path, path)
    meta = json.loads((path / META).read_text())
    for entry in chain(*meta["files"].values()):
        entry.pop("text_bytes", None)
    meta.pop("fingerprint")
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / META).write_text(json.dumps({**meta, "fingerprint": digest}))
    return read_corpus(path)


def test_a_corpus_has_the_fingerprint_that_an_earlier_release_gave_it(mixed: Corpus, tmp_path: Path) -> None:
    assert "text_bytes" in mixed.files["validation"][0]
    assert of_earlier_release(mixed, tmp_path / "c").fingerprint == mixed.fingerprint


def test_where_an_earlier_release_did_not_count_them_it_is_an_estimate_and_says_so(
    mixed: Corpus, tmp_path: Path
) -> None:
    old = of_earlier_release(mixed, tmp_path / "c")
    said: list[str] = []
    bits = bits_per_byte(old, said.append)
    assert bits.whole == pytest.approx(of_one_nat(sum(mixed.tokens.values()), mixed.text_bytes))
    assert bits.parts == {} and "are an estimate, by the mean of all its text" in said[0]


def test_validation_text_lies_by_part(mixed: Corpus) -> None:
    files = {entry["name"]: entry["part"] for entry in mixed.files["validation"]}
    assert [*files.items()] == [("validation-0-00000.bin", "largo"), ("validation-1-00000.bin", "corto")]
    of_first = [document.startswith("largo") for document in documents_of(mixed, "validation")]
    assert of_first == sorted(of_first, reverse=True) and 50 < sum(of_first) < len(of_first) - 50
    (train,) = mixed.files["train"]
    assert "part" not in train and train["name"] == "train-00000.bin"


def test_a_window_belongs_to_the_part_in_which_it_begins(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    corpus = build(mixture(parts, 0.7, 0.3), tmp_path / "c", SETTINGS)
    assert len(corpus.files["validation"]) > 6
    sequences = Sequences(corpus, "validation", LENGTH)
    everything = np.arange(len(sequences))
    found = sequences.by_part(everything)
    assert list(found) == ["largo", "corto"]
    for part, own in found.items():
        assert own.tolist() == windows_of(part, corpus, everything).tolist()
    # Those that are validated are spread over the parts as the text is.
    for count in (10, 37):
        config = resolve("gpt2-nano", {"seq_len": LENGTH, "validation_windows": count})
        own = sequences.by_part(validation_windows(sequences, config))["largo"]
        assert abs(len(own) / count - len(found["largo"]) / len(sequences)) <= 1 / count
    assert list(sequences.by_part(everything[:0])) == ["largo", "corto"]


@pytest.mark.parametrize("count", [21, 10_000])
def test_each_part_has_the_bits_per_byte_of_its_own_windows(mixed: Corpus, count: int) -> None:
    values = {"seq_len": LENGTH, "vocab_size": 300, "batch_size": 4, "validation_windows": count}
    config = resolve("gpt2-nano", values)
    torch.manual_seed(0)
    model = model_of(config)
    sequences = Sequences(mixed, "validation", LENGTH)
    chosen = validation_windows(sequences, config)
    losses = validation_loss(model, sequences, config, Ranks(0, ["node0"], CPU), CPU)
    bits = losses.times(bits_per_byte(mixed, refuse))

    def plain(some: np.ndarray, *names: str) -> float:
        """The mean loss of these sequences, by the text of these parts."""
        inputs, targets = sequences.read(some)
        batches = zip(inputs.split(64), targets.split(64), strict=True)
        with torch.no_grad():
            nats = sum(model.loss_sum(*each).item() for each in batches)
        return nats / targets.numel() * of_one_nat(*map(sum, zip(*map(text_of, names), strict=True)))

    def text_of(part: str) -> tuple[int, int]:
        """Its tokens for validation, and the bytes that they are decoded to."""
        files = [mixed.path / one["name"] for one in mixed.files["validation"] if one["part"] == part]
        ids = np.concatenate([np.fromfile(file, "<u2") for file in files]).tolist()
        return len(ids), len(Tokenizer.from_file(str(mixed.path / TOKENIZER)).decode(ids).encode())

    assert list(bits.parts) == ["largo", "corto"]
    for part, found in bits.parts.items():
        assert found == pytest.approx(plain(windows_of(part, mixed, chosen), part), rel=1e-5)
    assert bits.whole == pytest.approx(plain(chosen, "largo", "corto"), rel=1e-5)
    assert bits.parts["largo"] != pytest.approx(bits.parts["corto"], rel=1e-3)


def test_one_rank_and_two_say_the_same_of_every_part(ranks: list[Trainer]) -> None:
    one, *two = (trainer.status for trainer in ranks)
    assert list(one["bits_per_byte_of_parts"]) == ["largo", "corto"]
    for status in two:
        assert status["bits_per_byte"] == pytest.approx(one["bits_per_byte"], abs=1e-4)
        assert status["bits_per_byte_of_parts"] == pytest.approx(one["bits_per_byte_of_parts"], abs=2e-4)
    assert two[0]["bits_per_byte_of_parts"] == two[1]["bits_per_byte_of_parts"]
    low, high = sorted(one["bits_per_byte_of_parts"].values())
    assert low < one["bits_per_byte"] < high


def test_lines_log_and_curves_say_it_too(ranks: list[Trainer]) -> None:
    for trainer in ranks[:2]:
        log = [row for row in rows(trainer.run_dir / "training_log.csv") if row["validation_loss"]]
        assert [row["step"] for row in log] == ["10", "20"]
        events = EventAccumulator(str(trainer.run_dir / "tensorboard")).Reload()
        for name in ("bits_per_byte", "bits_per_byte/largo", "bits_per_byte/corto"):
            drawn = {event.step: event.value for event in events.Scalars(f"Loss/validation_{name}")}
            assert list(drawn) == [0, 10, 20]
            assert [float(row[name]) for row in log] == pytest.approx([drawn[10], drawn[20]])
        last = [float(log[-1][f"bits_per_byte{part}"]) for part in ("", "/largo", "/corto")]
        of_parts = {"largo": last[1], "corto": last[2]}
        assert trainer.status["bits_per_byte_of_parts"] == pytest.approx(of_parts, abs=1e-4)
        shown = "{:.3f} bits per byte (largo {:.3f}, corto {:.3f})".format(*last)
        assert f"Validation loss at the end: {trainer.done['validation_loss']:.4f}, {shown};" in trainer.text
        assert re.search(rf"Epoch 1/1 \| .* \| {re.escape(shown)}$", trainer.text, re.M)
        begin = r"at start: .* bits per byte \(largo \d\.\d{3}, corto \d\.\d{3}\) \(ln"
        assert re.search(begin, trainer.text)
    unvalidated = rows(ranks[0].run_dir / "training_log.csv")[0]
    assert unvalidated["bits_per_byte/largo"] == unvalidated["bits_per_byte"] == ""


def test_a_run_that_goes_on_keeps_its_log(mixed: Corpus, tmp_path: Path) -> None:
    """Also with so few sequences that a part gets none."""
    complete(start(tmp_path, mixed, 1, "--batch-size 4 --steps 10"))
    again = complete(start(tmp_path, mixed, 1, "--batch-size 4 --validation-windows 1"))[0]
    log = rows(again.run_dir / "training_log.csv")
    assert [row["step"] for row in log] == ["1", "5", "10", "11", "15", "20"]
    assert [bool(row["bits_per_byte/corto"]) for row in log if row["validation_loss"]] == [True, False]
    assert len(list(again.run_dir.glob("training_log*"))) == 1


def test_parts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    parts = []
    for number, word in enumerate(("uno", "dos", "tres")):
        file = write_part(tmp_path / f"{word}.jsonl", word, 200, 9, number)
        parts.append(Part("otro" if word == "tres" else "a, b", 1, LocalFiles([file])))
    corpus = build(Mixture(parts), tmp_path / "c", SETTINGS)
    names = ["a__b", "a__b-2", "otro"]  # a comma would end a column of the log
    assert [part["name"] for part in corpus.source["parts"]] == names
    assert [entry["part"] for entry in corpus.files["validation"]] == names
    trainer = complete(start(tmp_path, corpus, 1, "--steps 2"))[0]
    last = rows(trainer.run_dir / "training_log.csv")[-1]
    assert float(last["bits_per_byte/a__b-2"]) > 0 and float(last["bits_per_byte/otro"]) > 0


def test_a_part_without_validation_text_has_no_file_and_no_figure(tmp_path: Path) -> None:
    """Of so small a part no document may be drawn."""
    many = write_part(tmp_path / "many.jsonl", "many", 3000, 40, 1)
    few = write_part(tmp_path / "few.jsonl", "few", 3000, 40, 5)
    settings = replace(SETTINGS, validation_fraction=0.03)
    corpus = build(mixture({"few": few, "many": many}, 0.001, 0.999), tmp_path / "c", settings)
    assert corpus.source["parts"][0]["tokens"] > 0
    assert [entry["part"] for entry in corpus.files["validation"]] == ["many"]
    assert not list(corpus.path.glob("validation-0*")) and read_corpus(corpus.path) == corpus
    assert list(bits_per_byte(corpus, refuse).parts) == ["many"]
