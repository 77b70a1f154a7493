"""llama.cpp reads an export as it was trained: the same tokens of a text, and the same text after it."""

from __future__ import annotations

import http.client
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import xllamacpp
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import END_OF_TEXT, TOKENIZER, Corpus
from aura.corpus.tokenizer import train
from aura.errors import ConfigError
from aura.model import export, gguf_file, sample
from aura.model.family import model_of
from aura.model.language_model import LanguageModel
from aura.optim.muon import optimizer_of
from conftest import WORDS
from tokenizers import Tokenizer, pre_tokenizers

CONTEXT = 224
SMALL = {
    "layers": 2,
    "heads": 4,
    "d_model": 64,
    "seq_len": CONTEXT,
    "vocab_multiple": 64,
    "optimizer": "muon",
}
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
        there = http.client.HTTPConnection(urlsplit(self.server.listening_address).netloc, timeout=60)
        there.request("POST", f"/{path}", json.dumps(what), {"Content-Type": "application/json"})
        answer = json.loads(there.getresponse().read())
        there.close()
        return answer


def learnt_by_heart(config: TrainConfig, tokens: list[int]) -> LanguageModel:
    """So that no two words are nearly as likely, and rounding decides nothing. Gains are numbers of their own."""
    torch.manual_seed(0)
    model = model_of(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.rand_like(parameter) * 0.4 - 0.2
    optimizer = optimizer_of(model, config)
    window = torch.tensor([tokens])
    for step in range(80):
        model.zero_grad()
        (model.loss_sum(window[:, :-1], window[:, 1:]) / CONTEXT).backward()
        optimizer.step(1.5e-2 * min(1, (80 - step) / 40))
    return model.eval()


def spanish_lines(count: int) -> list[str]:
    rng, more = (
        random.Random(0),
        "¿Cuánto? ¡1.234,56 €! «así» – … 🙂 l'aigua  dos\ttres\n\n fin ñandú ÁÉ 2026".split(" "),
    )
    return [" ".join(rng.choices(WORDS.split() + more, k=12)).capitalize() for _ in range(count)]


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
    config = resolve("gpt2-nano", {**SMALL, **family, "vocab_size": rows + 20})
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
    other = Tokenizer.from_file(str(file))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.save(str(tmp_path / TOKENIZER))
    config = resolve("gpt2-nano", {"vocab_size": corpus.vocab_size})
    with pytest.raises(ConfigError, match=r"llama\.cpp would cut text in another way than this tokenizer"):
        export.export(config, parameters, tmp_path / TOKENIZER, tmp_path / "final", ["F16"])
    assert not (tmp_path / "final").exists()
