"""Small models that have learnt a text by heart: what they say is known to the letter, whoever computes it."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path

import torch
from aura.checkpoint import store as checkpoint
from aura.config import TrainConfig, resolve
from aura.corpus import chatml
from aura.corpus.corpus import TOKENIZER, Corpus, special_of
from aura.corpus.special_tokens import count_ids, with_special_tokens
from aura.corpus.tokenizer import train
from aura.model.family import model_of
from aura.model.language_model import LanguageModel
from aura.optim.muon import optimizer_of
from aura.run.directory import describe
from conftest import WORDS
from tokenizers import Tokenizer

SMALL = {"layers": 2, "heads": 4, "d_model": 64, "vocab_multiple": 64, "optimizer": "muon"}
DIALOGUE = [
    {"role": "user", "content": "¿Qué lee el perro?"},
    {"role": "assistant", "content": "El perro lee la red 🙂, ñandú."},
    {"role": "user", "content": "¿Y en casa?"},
    {"role": "assistant", "content": "Cinco modelos con datos."},
]
QUESTIONS, ANSWERS = ([each["content"] for each in DIALOGUE[first::2]] for first in (0, 1))


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
        (model.loss_sum(window[:, :-1], window[:, 1:]) / len(tokens)).backward()
        optimizer.step(1.5e-2 * min(1, (80 - step) / 40))
    return model.eval()


def spanish_lines(count: int) -> list[str]:
    rng, words = random.Random(0), WORDS.split()
    words += "¿Cuánto? ¡1.234,56 €! «así» – … 🙂 l'aigua  dos\ttres\n\n fin ñandú ÁÉ 2026".split(" ")
    return [" ".join(rng.choices(words, k=12)).capitalize() for _ in range(count)]


def tuned_run(run_dir: Path, corpus: Corpus, **settings: object) -> Path:
    """The run of a model that has learnt DIALOGUE, as `aura tune` would leave it; `corpus`: for all that is not said
    here."""
    tokenizer = Tokenizer.from_str(train([line.replace("🙂", "") for line in spanish_lines(200)], 400).json)
    tokenizer = with_special_tokens(tokenizer, [chatml.BEGIN, chatml.END])
    ids = tokenizer.encode(chatml.written(DIALOGUE)).ids
    context = {"seq_len": 2 * len(ids), "vocab_size": count_ids(tokenizer)}
    config = resolve("gpt2-nano", {**SMALL, "family": "qwen3", "kv_heads": 2, **context, **settings})
    own = run_dir.with_name("tuned-corpus")
    own.mkdir(parents=True)
    tokenizer.save(str(own / TOKENIZER))
    meta = {"end_of_answer": chatml.END, "chat_template": chatml.TEMPLATE}
    model = learnt_by_heart(config, ids)
    named = replace(corpus, path=own, special=special_of(meta))
    describe(run_dir, config, named, model.parameter_count(), config.seq_len)
    state = {"step": 80, "config": asdict(config)}
    checkpoint.write(
        run_dir / "checkpoints", "checkpoint-step-80", checkpoint.parameters_of(model), {}, state
    )
    return run_dir
