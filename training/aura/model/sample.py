"""A trained model continues a text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from aura.checkpoint import store as checkpoint
from aura.config import from_values
from aura.corpus.special_tokens import special_tokens
from aura.model import export
from aura.model.family import model_of
from aura.model.language_model import LanguageModel


@dataclass(frozen=True)
class Trained:
    model: LanguageModel  # in fp32 on the best device
    tokenizer: Tokenizer
    special: Mapping[str, str]  # what special_tokens says

    def id_of(self, name: str) -> int | None:
        """Of bos_token or eos_token; None where there is none."""
        return self.tokenizer.token_to_id(self.special[name]) if name in self.special else None

    @property
    def ends(self) -> set[int]:
        """Behind these comes another text, and behind an answer another question."""
        return {number for name in ("bos_token", "eos_token") if (number := self.id_of(name)) is not None}


@torch.no_grad()
def generate(
    model: LanguageModel,
    ids: Iterable[int],
    count: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    seed: int,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Up to `count` token ids that go on behind `ids`, all below `vocab_size`; one of `ends` is the last one.

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
        yield ids[-1]
        if ids[-1] in ends:
            break


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of these ids, as far as it is known after each: a letter whose bytes are several tokens comes whole."""
    known: list[int] = []
    whole = text = ""
    for number in ids:
        known.append(number)
        text = tokenizer.decode(known)
        # What bytes that are no letter yet are decoded to.
        if len(now := text.rstrip("\ufffd")) > len(whole):
            yield now[len(whole) :]
            whole = now
    yield text[len(whole) :]


def load(path: Path) -> Trained:
    """A verified checkpoint or an exported model. Raises DataError."""
    file = export.tokenizer_of(path)
    if export.is_exported(path):
        model = export.load(path)
    else:
        model = model_of(from_values(export.verified_state(path)["config"]))
        checkpoint.load_parameters(path, model)
    model = model.float().eval().to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = export.read_tokenizer(file)
    return Trained(model, tokenizer, special_tokens(file.parent, tokenizer))
