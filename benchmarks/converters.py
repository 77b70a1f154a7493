"""How often a SentencePiece model, converted, gives the ids that SentencePiece gives: our converter, transformers' own.

`python benchmarks/converters.py` trains sixteen small models (kind, byte fallback, spaces) on the lab's Spanish text
and compares 500 other lines of it. transformers has no converter for any SentencePiece model, but one per family of
models: here the base of most of them (`SpmConverter`) and what it does with a directory that holds nothing but the
model (`build_tokenizer_from_spm_proto`).
"""

from __future__ import annotations

import io
import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sentencepiece
from aura.corpus.tokenizer import SAMPLE, from_sentencepiece
from measuring import options, show, spanish_text
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import SentencePieceExtractor, SpmConverter

ODD = ("palabras nuevas: xilófono, 漢字 y más", " un espacio delante", "un\ttabulador", "a</s>b")


class WithByteFallback(SpmConverter):
    handle_byte_fallback = True


def by_family(path: Path, byte_fallback: bool, dummy_prefix: bool) -> Tokenizer:
    converter: Any = WithByteFallback if byte_fallback else SpmConverter
    return converter(SimpleNamespace(vocab_file=str(path), add_prefix_space=dummy_prefix)).converted()


def by_model_alone(path: Path) -> Tokenizer:
    extractor = SentencePieceExtractor(str(path))
    parts: Any = extractor.extract(None)  # a dictionary, whatever its annotation says
    build: Any = SpmConverter.build_tokenizer_from_spm_proto
    return build(extractor.proto, parts["vocab"], parts.get("merges"))


def equal(convert: Callable[[], Tokenizer], processor: Any, lines: list[str]) -> str:
    try:
        tokenizer = convert()
    except Exception as error:  # the point of the comparison
        return type(error).__name__
    return str(
        sum(tokenizer.encode(line, add_special_tokens=False).ids == processor.encode(line) for line in lines)
    )


def row(
    text: list[str], lines: list[str], kind: str, fallback: bool, dummy: bool, squeeze: bool
) -> list[str]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, model_type=kind, vocab_size=2000,
        byte_fallback=fallback, add_dummy_prefix=dummy, remove_extra_whitespaces=squeeze,
        hard_vocab_limit=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spanish.model")
        path.write_bytes(model.getvalue())
        ways = (
            lambda: from_sentencepiece(path),
            lambda: by_family(path, fallback, dummy),
            lambda: by_model_alone(path),
        )
        about = [
            kind,
            "yes" if fallback else "no",
            "yes" if dummy else "no",
            "removed" if squeeze else "kept",
        ]
        return about + [equal(way, processor, lines) for way in ways]


def main() -> None:
    given = options(__doc__).parse_args()
    warnings.simplefilter("ignore")
    book = (given.text or spanish_text()) / "debian-handbook.txt"
    text = [line for line in book.read_text(encoding="utf-8").splitlines() if len(line) > 20]
    lines = [*text[3000:], *SAMPLE, *ODD]
    models = itertools.product(("unigram", "bpe"), (False, True), (True, False), (True, False))
    headings = ("kind", "bytes", "dummy prefix", "extra spaces", "ours", "SpmConverter", "model alone")
    rows = [row(text[:3000], lines, *model) for model in models]
    show(f"Lines with SentencePiece's ids, of {len(lines)}", headings, rows, left=headings)


if __name__ == "__main__":
    main()
