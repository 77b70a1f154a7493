"""`aura prepare`: the command line of aura/corpus/prepare.py, and what it says to a person."""

from __future__ import annotations

import math
import os
from pathlib import Path

from aura.commands.bars import Bars
from aura.commands.flags import add_dataset
from aura.commands.prepare_sources import source_of, usual_vocabulary
from aura.corpus.catalogue import DATASETS
from aura.corpus.corpus import META, Corpus
from aura.corpus.prepare import build
from aura.corpus.work import Settings
from aura.errors import ConfigError, Parser
from aura.storage.address import directory_here
from aura.texts.console import put, text

WORTH_WORKERS = 8_000_000  # bytes of input; below, starting processes costs more than they save


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if (arguments.input is None) == (arguments.dataset is None):
        raise ConfigError("input_or_dataset")
    source = source_of(arguments)
    vocab_size = arguments.vocab_size
    if vocab_size is None and arguments.tokenizer is None:
        vocab_size = usual_vocabulary(arguments.dataset or [])
        put(text("usual_vocabulary", count=vocab_size))
    small = source.size is not None and source.size < WORTH_WORKERS
    settings = Settings(
        vocab_size=vocab_size,
        validation_fraction=arguments.validation_fraction,
        tokenizer=arguments.tokenizer,
        max_tokens=arguments.dataset_max_tokens,
        max_errors=arguments.max_errors,
        accept_lossy=arguments.accept_lossy_tokenizer,
        workers=arguments.workers or (1 if small else len(os.sched_getaffinity(0))),
    )
    existed = (arguments.output / META).exists()
    with Bars() as bars:
        corpus = build(source, arguments.output, settings, bars)
    if existed:
        put(text("up_to_date", path=arguments.output))
    else:
        _say_if_small(settings, corpus)
    _say_what_there_is(corpus)
    return 0


def _say_if_small(settings: Settings, corpus: Corpus) -> None:
    if settings.vocab_size and corpus.vocab_size < settings.vocab_size:
        put(text("fewer_token_ids", count=corpus.vocab_size))


def _say_what_there_is(corpus: Corpus) -> None:
    for part in corpus.source.get("parts", []):
        share = part["tokens"] / sum(corpus.tokens.values())
        put(text("part_of_mixture", name=part["name"], share=share, tokens=part["tokens"]))
    if "duplicates" in corpus.source:
        put(text("left_out_duplicates", count=corpus.source["duplicates"]))
    if any(corpus.skipped.values()):
        put(text("left_out_in_all", **corpus.skipped))
    put(
        text(
            "prepared",
            **corpus.tokens,
            ratio=corpus.text_bytes / sum(corpus.tokens.values()),
            vocabulary=corpus.vocab_size,
            entropy=corpus.unigram_entropy,
            uniform=math.log(corpus.vocab_size),
            fingerprint=corpus.fingerprint,
        )
    )


def _parser() -> Parser:
    parser = Parser(
        prog="aura prepare",
        description="Turn text into a corpus: train a byte-level BPE on it or take an existing tokenizer, encode it, "
        "divide it into training and validation. The same text and settings give the same fingerprint; a corpus that "
        "is up to date is left alone; after an interruption the same command goes on.",
    )
    _add_what_is_read(parser)
    _add_what_comes_out(parser)
    return parser


def _add_what_is_read(parser: Parser) -> None:
    files = parser.add_argument_group("what is read: files")
    files.add_argument(
        "--input",
        "--dataset-path",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="UTF-8 .txt, .jsonl, .parquet, also .gz, .bz2, .xz, .zst; directories of them; patterns in quotes",
    )
    files.add_argument(
        "--documents-per-line", action="store_true", help="every line of a text file is one document"
    )
    hub = parser.add_argument_group("or a dataset of the Hugging Face hub, or a local directory that is one")
    hub.add_argument(
        "--dataset",
        "--dataset-name",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(DATASETS)}, any other name, or a directory; or a mixture: several of them, or files, each "
        "with its share of the text, as in fineweb2-es=0.7 books.jsonl=0.3",
    )
    add_dataset(hub)
    both = parser.add_argument_group("for both")
    both.add_argument(
        "--dataset-column", default="text", metavar="NAME", help="of .jsonl, parquet and datasets (text)"
    )
    both.add_argument(
        "--dataset-max-tokens", type=int, metavar="N", help="stop with the document that reaches N"
    )
    both.add_argument(
        "--max-errors",
        type=int,
        default=0,
        metavar="N",
        help="broken places that are left out (0: stop at once)",
    )
    both.add_argument("--workers", type=int, metavar="N", help="processes that encode (one per core)")
    both.add_argument("--seq-len", type=int, metavar="N", help="accepted, as the guides have it; no effect")


def _add_what_comes_out(parser: Parser) -> None:
    result = parser.add_argument_group("what comes out")
    result.add_argument(
        "--output",
        type=directory_here,
        required=True,
        metavar="DIR",
        help="directory of the corpus",
    )
    result.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="train a tokenizer with N token ids (32768, for more than one language 49152)",
    )
    result.add_argument(
        "--tokenizer",
        "--tokenizer-name-or-path",
        metavar="PATH",
        help="or take this one: tokenizer.json, SentencePiece .model, a directory with one of them or with vocab.json "
        "and merges.txt, a name on the hub",
    )
    result.add_argument(
        "--accept-lossy-tokenizer",
        action="store_true",
        help="take it although it loses letters of this text: train on what is left",
    )
    result.add_argument(
        "--validation-fraction",
        "--validation-split",
        type=float,
        default=0.01,
        metavar="PART",
        help="part of the documents (0.01)",
    )
