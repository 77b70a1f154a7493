"""llama.cpp reads an export as it was trained: the same tokens of a text, and the same text after it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import xllamacpp
from aura.config import resolve
from aura.corpus.corpus import END_OF_TEXT, TOKENIZER, Corpus
from aura.corpus.tokenizer import train
from aura.errors import ConfigError
from aura.model import export, gguf_file, sample
from aura.model.family import model_of
from by_heart import SMALL, learnt_by_heart, spanish_lines
from services import asked
from test_prepare import documents_of
from tokenizers import Tokenizer
from trainers import Trainer

CONTEXT = 224
FAMILIES = [
    {"family": "gpt2"},
    {"family": "qwen3", "kv_heads": 2},
    {"family": "qwen3", "kv_heads": 1, "tied": "false"},
]


class Llama:
    """llama.cpp's server on loopback."""

    def __init__(self, file: Path) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx, parameters.n_parallel, parameters.port = CONTEXT, 1, 0
        parameters.warmup = False
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        self.server = xllamacpp.Server(parameters)

    def ask(self, path: str, **what: Any) -> Any:
        return asked(urlsplit(self.server.listening_address).netloc, f"/{path}", **what)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of these very lines, so that pieces of years and of words with accents depend on where llama.cpp cuts first."""
    return Tokenizer.from_str(train(spanish_lines(400), 600).json)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_same_ids_and_the_same_greedy_tokens(
    family: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    rows = tokenizer.get_vocab_size()
    tokenizer.save(str(tmp_path / TOKENIZER))
    config = resolve("gpt2-nano", {**SMALL, "seq_len": CONTEXT, **family, "vocab_size": rows + 20})
    text = " ".join(spanish_lines(20))
    begin = tokenizer.token_to_id(END_OF_TEXT)
    tokens = [begin, *tokenizer.encode(text).ids][: CONTEXT + 1]
    model, final = learnt_by_heart(config, tokens), tmp_path / "final"
    export.export(config, model.state_dict(), tmp_path / TOKENIZER, final, gguf_file.FORMATS)

    asked = text[: text.index(" ", 20)]
    prompt = [begin, *tokenizer.encode(asked).ids]
    assert prompt == tokens[: len(prompt)]
    ours = [*prompt, *sample.generate(model, prompt, 200, rows, 0, 0, 0)]
    theirs = AutoModelForCausalLM.from_pretrained(final)
    made = theirs.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)[0].tolist()
    assert ours == made == tokens[: len(ours)], "it has not been learnt by heart"
    for form in gguf_file.FORMATS:
        llama = Llama(final / gguf_file.name_of(form))
        said = llama.ask("completion", prompt=prompt, n_predict=200, temperature=0, return_tokens=True)
        assert said["tokens"] == ours[len(prompt) :], form
    # Words as a person gives them: the token that a document begins with is llama.cpp's to add.
    said = llama.ask("completion", prompt=asked, n_predict=8, temperature=0, return_tokens=True)
    assert said["tokens"] == ours[len(prompt) :][:8]
    for line in spanish_lines(400):
        assert llama.ask("tokenize", content=line)["tokens"] == tokenizer.encode(line).ids, line
        assert llama.ask("tokenize", content=f"{line}{END_OF_TEXT}")["tokens"][-1] == begin


def test_what_llama_cpp_would_read_otherwise_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    config = resolve("gpt2-nano", {"family": "hrm-text", "vocab_size": corpus.vocab_size})
    parameters, file = model_of(config).state_dict(), corpus.path / TOKENIZER
    with pytest.raises(ConfigError, match=r"no model of family=hrm-text: --gguf is for gpt2 and qwen3"):
        export.export(config, parameters, file, tmp_path / "final", ["F16"])
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model.ignore_merges", {"model": {"ignore_merges": True}}),
        ("model.unk_token", {"model": {"unk_token": END_OF_TEXT}}),
        ("model.byte_fallback", {"model": {"byte_fallback": True}}),
        ("model.dropout", {"model": {"dropout": 0.1}}),
        ("model.end_of_word_suffix", {"model": {"end_of_word_suffix": "</w>"}}),
        ("model.one_that_is_new", {"model": {"one_that_is_new": 7}}),
        ("pre_tokenizer", {"pre_tokenizer": {"add_prefix_space": True}}),
        ("pre_tokenizer", {"pre_tokenizer": {"use_regex": False}}),
        ("pre_tokenizer", {"pre_tokenizer": {"type": "Whitespace"}}),
        ("normalizer", {"normalizer": {"type": "NFC"}}),
        ("nothing", {"decoder": {"type": "WordPiece"}}),  # of ids it says nothing
        ("added_tokens ('<|endoftext|>')", {"added": {"special": False}}),
        ("added_tokens ('<|endoftext|>')", {"added": {"lstrip": True}}),
        ("model.vocab", {"vocab": "é"}),
        ("model.merges", {"merges": 1}),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_what_is_not_known_to_be_equal_is_refused(part: str, change: dict[str, Any]) -> None:
    made = json.loads(train(spanish_lines(50), 300).json)
    assert not gguf_file.not_known_there(made)
    for name, values in change.items():
        if name == "added":
            made["added_tokens"][0] |= values
        elif name == "vocab":
            made["model"]["vocab"].pop("é" if "é" in made["model"]["vocab"] else "Ã")
        elif name == "merges":
            made["model"]["merges"] += made["model"]["merges"][:values]
        else:
            made[name] = {**(made[name] or {}), **values}
    assert gguf_file.not_known_there(made) == {part} - {"nothing"}


def test_ids_of_the_corpus_are_compared_through_llama_cpp(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what a property does not tell: a word that no merge makes, and that is taken at once all the same."""
    made = json.loads(tokenizer.to_str())
    made["model"]["vocab"]["ĠDulcinea"] = tokenizer.get_vocab_size()
    made["model"]["ignore_merges"] = True
    (tmp_path / TOKENIZER).write_text(json.dumps(made))
    config = resolve("gpt2-nano", {**SMALL, "vocab_size": tokenizer.get_vocab_size() + 1})
    write = partial(export.export, config, model_of(config).state_dict(), tmp_path / TOKENIZER)
    with pytest.raises(ConfigError, match=r"of its model\.ignore_merges: --gguf is for byte-level BPE"):
        write(tmp_path / "final", ["F16"])
    monkeypatch.setattr(gguf_file, "not_known_there", lambda made: set())
    write(tmp_path / "equal", ["F16"], spanish_lines(20))
    with pytest.raises(ConfigError, match=r"of 1 of 2 pieces of the corpus, .* begins with 'Que Dulcinea'"):
        write(tmp_path / "final", ["F16"], ["hola", "Que Dulcinea"])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["equal"]


def test_the_sample_is_the_text_that_the_run_is_validated_on(
    reference: list[Trainer], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(gguf_file, "compare_ids", lambda file, tokenizer, texts: heard.extend(texts))
    path = max((reference[0].run_dir / export.CHECKPOINTS).glob("checkpoint-step-*"))
    export.export_checkpoint(path, tmp_path / "final", ["F16"])
    assert "".join(heard) == "".join(documents_of(corpus, "validation"))
    heard.clear()
    monkeypatch.setattr(export, "_corpus_of", lambda run: tmp_path)  # it is no longer there
    export.export_checkpoint(path, tmp_path / "final", ["F16"])
    assert not heard
