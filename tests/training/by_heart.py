"""Small models that have learnt a text by heart: what they say is known to the letter, whoever computes it."""

from __future__ import annotations

import random

import torch
from aura.config import TrainConfig
from aura.model.family import model_of
from aura.model.language_model import LanguageModel
from aura.optim.muon import optimizer_of
from conftest import WORDS

SMALL = {"layers": 2, "heads": 4, "d_model": 64, "vocab_multiple": 64, "optimizer": "muon"}


def learnt_by_heart(config: TrainConfig, tokens: list[int]) -> LanguageModel:
    """So that no two words are nearly as likely, and rounding decides nothing. Gains are numbers of their own."""
    torch.manual_seed(0)
    model = model_of(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.rand_like(parameter) * 0.4 - 0.2
    optimizer = optimizer_of(model, config)
    sequence = torch.tensor([tokens])
    for step in range(80):
        model.zero_grad()
        (model.loss_sum(sequence[:, :-1], sequence[:, 1:]) / len(tokens)).backward()
        optimizer.step(1.5e-2 * min(1, (80 - step) / 40))
    return model.eval()


def spanish_lines(count: int) -> list[str]:
    rng, words = random.Random(0), WORDS.split()
    words += "¿Cuánto? ¡1.234,56 €! «así» – … 🙂 l'aigua  dos\ttres\n\n fin ñandú ÁÉ 2026".split(" ")
    return [" ".join(rng.choices(words, k=12)).capitalize() for _ in range(count)]
