"""The tokenizer of a corpus: trained on its text, or one that exists.

Whatever it was before, in a corpus it is tokenizer.json (for `tokenizers`) with a token that ends a document and one
that pads; what is missing is added, and said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from aura.corpus.corpus import END_OF_TEXT, TOKENIZER, TOKENIZER_CONFIG
from aura.corpus.sentencepiece_model import SentencePiece
from aura.corpus.special_tokens import (
    ENDS,
    PAD,
    PADS,
    SPECIAL_TOKENS,
    count_ids,
    is_tuned,
    settings_of,
    with_special_tokens,
)
from aura.errors import AuraError, ConfigError
from aura.texts import console

VOCABULARY = "vocab.json"  # with merges.txt
HUB_FILES = [TOKENIZER, "*.model", VOCABULARY, "merges.txt", SPECIAL_TOKENS, TOKENIZER_CONFIG]
SMALLEST_VOCABULARY = 257  # 256 bytes and <|endoftext|>
LONGEST_PRE_TOKEN = 1000  # bytes; training takes time with the square of it


@dataclass(frozen=True)
class Prepared:
    """A tokenizer as the corpus needs it."""

    json: str  # content of tokenizer.json
    vocab_size: int  # all ids are below
    end_of_text: str
    end_of_text_id: int
    pad: str
    pad_id: int
    sentencepiece: str = ""  # the model that it was converted from


def train(texts: Iterable[str], vocab_size: int) -> Prepared:
    """A byte-level BPE as GPT-2's: any text can be encoded, and decoding gives back the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Cut for training only: encoding takes n log n.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [byte_level, pre_tokenizers.FixedLength(length=LONGEST_PRE_TOKEN)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = byte_level
    return _prepared(tokenizer, END_OF_TEXT, END_OF_TEXT)


def load(name: str, say: Callable[[str], None]) -> Prepared:
    """A tokenizer.json, a SentencePiece .model, a directory with one of them (or vocab.json and merges.txt), or a name
    on the hub.

    Raises ConfigError.
    """
    path, settings = Path(name), dict[str, Any]()
    if not path.exists():
        path = _fetched(name)
    if path.is_dir():
        settings = settings_of(path)
        found = [path / TOKENIZER, *sorted(path.glob("*.model")), path / VOCABULARY]
        path = next((file for file in found if file.is_file()), path)
    if path.is_dir():
        raise ConfigError("no_tokenizer_in", tokenizer=TOKENIZER, vocabulary=VOCABULARY, name=name)
    if path.suffix == ".model":
        tokenizer = SentencePiece(path).converted()
    elif path.name == VOCABULARY:
        tokenizer = _from_vocabulary(path, bool(settings.get("add_prefix_space")))
    else:
        with one_sentence(name):
            tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.decoder is None and has_byte_level(json.loads(tokenizer.to_str())["pre_tokenizer"]):
        tokenizer.decoder = decoders.ByteLevel()  # "aÃ±o" is "año"; no id changes
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # What ends an answer of a tuned model ends no document.
    end = _chosen(settings.get("bos_token" if is_tuned(settings) else "eos_token"), ENDS, vocabulary)
    if end is None:
        end = END_OF_TEXT
        say(console.text("no_end_token", name=name, token=end))
    pad = _chosen(settings.get("pad_token"), PADS, vocabulary)
    if pad is None:
        pad = PAD
        say(console.text("no_padding_token", name=name, token=pad))
    return _prepared(tokenizer, end, pad, str(path) if path.suffix == ".model" else "")


def has_byte_level(part: dict[str, Any] | None) -> bool:
    """Does this pre-tokenizer or decoder of a tokenizer.json write bytes as letters, alone or in a sequence?"""
    part = part or {}
    steps = part.get("pretokenizers", part.get("decoders", []))
    return part.get("type") == "ByteLevel" or any(map(has_byte_level, steps))


def _prepared(tokenizer: Tokenizer, end: str, pad: str, sentencepiece: str = "") -> Prepared:
    tokenizer = with_special_tokens(tokenizer, [end, pad])
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ConfigError("two_tokens_with_one_id")
    return Prepared(
        json=tokenizer.to_str(pretty=False),
        vocab_size=count_ids(tokenizer),
        end_of_text=end,
        end_of_text_id=vocabulary[end],
        pad=pad,
        pad_id=vocabulary[pad],
        sentencepiece=sentencepiece,
    )


def unknown_id(tokenizer: Prepared) -> int | None:
    """The id that stands for letters which the vocabulary does not have; None where there is no such letter."""
    model = json.loads(tokenizer.json)["model"]
    if model["type"] == "Unigram":
        return None if model["byte_fallback"] else model["unk_id"]
    vocabulary: dict[str, int] = model["vocab"]
    return vocabulary.get(model["unk_token"]) if model.get("unk_token") else None


def _chosen(named: str | None, known: tuple[str, ...], vocabulary: dict[str, int]) -> str | None:
    """The token that the configuration names, or a well-known name; None when the vocabulary has none."""
    return next((token for token in (named, *known) if token in vocabulary), None)


def _fetched(name: str) -> Path:
    """The directory with the files of a tokenizer that the hub has, without the weights beside them."""
    if Path(name).suffix in (".json", ".model") or name.startswith((".", "/", "~")):
        raise ConfigError("no_tokenizer", name=name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with one_sentence(name, "tokenizer_not_fetched"):
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))


@contextmanager
def one_sentence(
    name: str, key: str = "tokenizer_unusable", error: type[AuraError] = ConfigError
) -> Iterator[None]:
    try:
        yield
    except Exception as raised:  # tokenizers raises nothing more precise, and the hub many things
        reason = (str(raised).strip() or type(raised).__name__).splitlines()[0].rstrip(".")
        raise error(key, name=name, error=reason) from None


def _from_vocabulary(path: Path, prefix_space: bool) -> Tokenizer:
    """vocab.json with merges.txt beside it, as GPT-2 and RoBERTa were published."""
    with one_sentence(str(path)):
        tokenizer = Tokenizer(models.BPE.from_file(str(path), str(path.with_name("merges.txt"))))
    vocabulary = tokenizer.get_vocab()
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()) or any(
        piece.endswith("</w>") for piece in vocabulary
    ):
        raise ConfigError("no_byte_level_bpe", path=path, tokenizer=TOKENIZER)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
