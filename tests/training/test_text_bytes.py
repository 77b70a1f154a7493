"""Losses per byte of text: the bytes are those of the text that tokens were made from."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from aura.commands.bars import Bars
from aura.corpus.corpus import TOKENIZER, Corpus
from aura.corpus.prepare import build
from aura.corpus.sources import LocalFiles
from aura.corpus.text_bytes import bits_per_byte, token_bytes
from aura.corpus.windows import Windows
from aura.corpus.work import Settings
from tokenizers import Tokenizer, models, pre_tokenizers


def all_tokens(corpus: Corpus, split: str) -> np.ndarray:
    return np.concatenate(Windows(corpus, split, 16).shards)


def text_of(corpus: Corpus) -> float:
    sizes = token_bytes(corpus)
    return sum(float(sizes[all_tokens(corpus, split)].sum()) for split in ("train", "validation"))


def prepared(text: Path, tmp_path: Path, tokenizer: Path) -> Corpus:
    return build(LocalFiles([text]), tmp_path / "c", Settings(None, 0.1, tokenizer=str(tokenizer)), Bars())


def test_a_loss_in_bits_per_byte_is_what_the_text_takes(corpus: Corpus) -> None:
    windows = Windows(corpus, "validation", 16)
    chosen = np.array([0, 3, len(windows) - 1])
    targets = [all_tokens(corpus, "validation")[16 * one + 1 : 16 * one + 17] for one in chosen]
    decoder = Tokenizer.from_file(str(corpus.path / TOKENIZER))
    text = sum(len(decoder.decode(list(map(int, each))).encode()) for each in targets)
    nats = 3.0 * 16 * len(chosen)
    assert 3.0 * bits_per_byte(corpus, windows, chosen).whole == pytest.approx(nats / math.log(2) / text)


def test_every_byte_of_the_text_is_counted_once(corpus: Corpus) -> None:
    assert text_of(corpus) == corpus.text_bytes


def test_a_sentencepiece_counts_the_space_before_a_document(text: Path, tmp_path: Path) -> None:
    sentences = text.read_text(encoding="utf-8").split("\n\n")
    with (tmp_path / "spanish.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, vocab_size=400, minloglevel=2, num_threads=1,
            byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        )  # fmt: skip
    made = prepared(text, tmp_path, tmp_path / "spanish.model")
    assert text_of(made) == made.text_bytes + made.source["documents"]


def test_a_vocabulary_that_says_nothing_of_bytes_gets_the_mean(text: Path, tmp_path: Path) -> None:
    words = sorted(set(text.read_text(encoding="utf-8").split()))
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "[UNK]"])}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.save(str(tmp_path / "plain.json"))
    made = prepared(text, tmp_path, tmp_path / "plain.json")
    assert text_of(made) == pytest.approx(made.text_bytes)
