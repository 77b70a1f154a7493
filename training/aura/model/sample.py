"""A trained model continues a text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from aura.checkpoint import store as checkpoint
from aura.config import from_values
from aura.corpus.corpus import TOKENIZER
from aura.model import export
from aura.model.family import model_of
from aura.model.language_model import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    ids: list[int],
    count: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    seed: int,
    end: int | None = None,
) -> list[int]:
    """`ids` and up to `count` more token ids, all below `vocab_size`; the token `end` is the last one.

    Temperature 0 takes the likeliest token each time. Nothing is cached: every token costs a pass over the last
    `model.seq_len` tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = list(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids[-model.seq_len :]], device=device))[0, -1, :vocab_size].float().cpu()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            if top_k:
                logits[logits < logits.topk(min(top_k, vocab_size)).values[-1]] = -torch.inf
            probabilities = torch.softmax(logits / temperature, dim=0)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if ids[-1] == end:
            break
    return ids


def load(path: Path) -> tuple[LanguageModel, Tokenizer]:
    """A verified checkpoint or an exported model, in fp32 on the best device, and its tokenizer. Raises DataError."""
    if export.is_exported(path):
        model, tokenizer = export.load(path), path / TOKENIZER
    else:
        tokenizer = export.tokenizer_of(path)
        model = model_of(from_values(export.verified_state(path)["config"]))
        checkpoint.load_parameters(path, model)
    model = model.float().eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return model, export.read_tokenizer(tokenizer)
