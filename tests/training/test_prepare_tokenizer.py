"""Existing tokenizers, and that words which are remembered get the ids that the library gives."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from aura.commands.bars import Bars
from aura.corpus import encode, tokenizer
from aura.corpus.corpus import Corpus
from aura.corpus.encode import Encoder
from aura.corpus.prepare import build
from aura.corpus.sequences import Sequences
from aura.corpus.sources import LocalFiles
from aura.corpus.tokenizer import Prepared
from aura.corpus.work import Settings
from aura.errors import ConfigError
from services import serving
from test_prepare import refuse
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture(scope="module")
def trained(text: Path) -> Prepared:
    return tokenizer.train(text.read_text(encoding="utf-8").split("\n\n") * 2 + ["\n\n  \n a  b"] * 9, 600)


def test_remembered_words_have_the_ids_of_the_library(
    trained: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "REMEMBERED_WORDS", 200)  # forgets now and then
    monkeypatch.setattr(encode, "LONGEST_REMEMBERED", 6)
    rng = random.Random(0)
    parts = [*"ab1ñ.,¡-'é\ufeff\0", *" " * 8, *"\n\t\r\u00a0\u2003\x1c\x85"]
    parts += ["  ", "'s", "<|endoftext|>", "la casa"]
    encoder = Encoder(trained.json, trained.end_of_text_id, "<u2")
    assert encoder.words
    for _ in range(100):
        texts = ["".join(rng.choices(parts, k=rng.randrange(30))) for _ in range(60)]
        assert encoder.words.encode(texts) == encoder.library(texts)


def test_other_tokenizers_are_not_cut_at_spaces(trained: Prepared) -> None:
    def independent(**changes: object) -> bool:
        return encode.words_are_independent(json.dumps(json.loads(trained.json) | changes))

    before = json.loads(trained.json)["pre_tokenizer"]
    assert independent()
    assert not independent(normalizer={"type": "NFC"})
    assert not independent(pre_tokenizer=None)
    assert not independent(pre_tokenizer=before | {"add_prefix_space": True})
    assert not independent(pre_tokenizer=before | {"use_regex": False})
    assert not independent(added_tokens=[{"content": "el la", "special": False}])


def test_the_corpus_tokenizer_can_be_used_again(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    again = tokenizer.load(str(corpus.path), refuse)
    assert (again.end_of_text, again.end_of_text_id, again.pad_id) == ("<|endoftext|>", 0, 0)
    made = build(LocalFiles([text]), tmp_path / "c", Settings(None, 0.1, tokenizer=str(corpus.path)))
    assert (made.vocab_size, made.tokenizer_sha256) == (corpus.vocab_size, corpus.tokenizer_sha256)
    assert made.files == corpus.files


def test_a_directory_as_transformers_writes_it(trained: Prepared, tmp_path: Path) -> None:
    parts = json.loads(trained.json)
    parts["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    parts["added_tokens"][0]["content"] = "<fin>"
    vocabulary = parts["model"]["vocab"]
    vocabulary["<fin>"] = vocabulary.pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    settings = {"eos_token": {"content": "<fin>"}, "pad_token": "<fin>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = tokenizer.load(str(tmp_path), refuse)
    assert (loaded.end_of_text, loaded.pad, loaded.pad_id) == ("<fin>", "<fin>", 0)
    assert len(Encoder(loaded.json, 0, "<u2").library(["la casa y el perro y la red"])[0]) > 8  # all of it

    # Of a tuned model's tokenizer what ends an answer ends no document.
    settings |= {"bos_token": "<fin>", "eos_token": "la", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer.load(str(tmp_path), refuse).end_of_text == "<fin>"


def test_a_vocabulary_and_its_merges(trained: Prepared, tmp_path: Path) -> None:
    whole = Tokenizer.from_str(trained.json)
    whole.model.save(str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"vocab.json", "merges.txt"}
    loaded = tokenizer.load(str(tmp_path), lambda sentence: None)
    texts = ["la casa y el perro", "  nuevas\n\npalabras: xilófono"]
    assert Encoder(loaded.json, 0, "<u2").library(texts) == Encoder(trained.json, 0, "<u2").library(texts)
    assert loaded.end_of_text_id == trained.end_of_text_id
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab</w>": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ConfigError, match="is no byte-level BPE"):
        tokenizer.load(str(tmp_path), refuse)


class Hub(BaseHTTPRequestHandler):
    """What the hub answers about one repository: its commit, its files, and their content."""

    files: dict[str, bytes]
    fetched: list[str]

    def do_HEAD(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        listed = [{"type": "file", "path": n, "size": len(data), "oid": n} for n, data in self.files.items()]
        about = {"id": "acme/spanish", "sha": "a" * 40, "siblings": []}
        content = json.dumps(listed if "/tree/" in self.path else about).encode()
        if "/resolve/" in self.path:
            content = self.files[name]
            self.fetched.append(name)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_tokenizer_of_the_hub_has_its_own_special_tokens(
    trained: Prepared, text: Path, tmp_path: Path
) -> None:
    Hub.fetched = []
    Hub.files = {
        "tokenizer.json": trained.json.replace("<|endoftext|>", "<fin>").encode(),
        "tokenizer_config.json": b'{"eos_token": {"content": "<fin>"}, "pad_token": "<fin>"}',
        "model.safetensors": b"weights",
    }
    words = ["--input", str(text), "--tokenizer", "acme/spanish", "--output", str(tmp_path / "c")]
    hub = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    with serving(Hub) as port:
        environment = os.environ | hub | {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}
        command = [sys.executable, "-m", "aura", "prepare", *words]
        subprocess.run(command, check=True, timeout=60, env=environment)
    meta = json.loads((tmp_path / "c" / "meta.json").read_text())
    assert (meta["end_of_text"], meta["pad"], meta["end_of_text_id"]) == ("<fin>", "<fin>", 0)
    assert set(Hub.fetched) == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_sentencepiece(kind: str, byte_fallback: bool, text: Path, tmp_path: Path) -> None:
    model = io.BytesIO()
    sentences = text.read_text(encoding="utf-8").split("\n\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, model_type=kind, vocab_size=500,
        byte_fallback=byte_fallback, hard_vocab_limit=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    (tmp_path / "spanish.model").write_bytes(model.getvalue())
    said: list[str] = []
    loaded = tokenizer.load(str(tmp_path), said.append)
    assert loaded.end_of_text == "</s>"
    assert "has no token for padding: <|pad|> was added" in said[0]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    encoder = Encoder(loaded.json, loaded.end_of_text_id, "<u2")
    assert encoder.words is None
    texts = [*sentences[:50], "palabras nuevas: xilófono, 漢字 y más"]
    for line, ids in zip(texts, encoder.library(texts), strict=True):
        assert np.frombuffer(ids, "<u2").tolist() == processor.encode(line)
    back = Tokenizer.from_str(loaded.json).decode(processor.encode("El perro lee la red."))
    assert back == "El perro lee la red."


def test_a_large_vocabulary_takes_32_bits(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = sorted(set(text.read_text(encoding="utf-8").replace("\n", " ").split(" ")))
    vocabulary = {f"nunca{i}": i for i in range(70000)} | {word: 70000 + i for i, word in enumerate(words)}
    large = Tokenizer(models.WordLevel(vocabulary | {"[UNK]": 70000 + len(words)}, "[UNK]"))
    large.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    large.save(str(tmp_path / "large.json"))
    settings = Settings(None, 0.1, tokenizer=str(tmp_path / "large.json"))
    made = build(LocalFiles([text]), tmp_path / "c", settings, Bars())
    assert "does not know" not in capsys.readouterr().out
    (tmp_path / "new.txt").write_text(text.read_text(encoding="utf-8").replace("perro", "can"))
    lossy = replace(settings, accept_lossy=True)
    build(LocalFiles([tmp_path / "new.txt"]), tmp_path / "d", lossy, Bars())
    assert f"became the same token ({70000 + len(words)})" in capsys.readouterr().out
    assert made.bytes_per_token == 4
    assert made.vocab_size == 70003 + len(words)
    inputs, _ = Sequences(made, "train", 32).read(np.array([0, 1]))
    back = {number: word for word, number in vocabulary.items()}
    read = [back[number] for number in inputs.flatten().tolist()]
    assert " ".join(read) in " ".join(text.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("content", ["[]", '{"eos_token": ["a"]}', '{"pad_token": {"content": 3}}'])
def test_tokens_that_are_no_texts_are_one_sentence(content: str, trained: Prepared, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained.json)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is damaged: it has to be a JSON object"):
        tokenizer.load(str(tmp_path), refuse)


def test_tokenizers_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.model").write_text("hola")
    (tmp_path / "empty").mkdir()
    for name, sentence in (
        ("missing.json", "There is no tokenizer"),
        ("bad.json", "cannot be used"),
        ("bad.model", "is no SentencePiece model"),
        ("empty", r"no tokenizer\.json, no SentencePiece model \(\*\.model\) and no vocab\.json"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            tokenizer.load(str(tmp_path / name), refuse)
