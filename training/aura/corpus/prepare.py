"""`aura prepare`: text in, a corpus out (see aura/corpus/corpus.py). docs/prepare.md explains it to its users.

The order of events:

1. Local files are read once for their SHA-256, which says whether this corpus exists already, or was begun.
2. The tokenizer is trained on the training documents, or an existing one is taken.
3. The documents are read again, encoded, divided by their hash and written.

A document goes to validation when its hash says so: the division does not depend on the names of the files or on
their order, and a document that occurs twice is never on both sides. Documents are read, encoded and written about a
megabyte at a time, so memory does not grow with the input; training the tokenizer holds the different words of its
sample, which ends at TOKENIZER_SAMPLE characters (aura/corpus/work.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from aura.corpus import corpus as corpora
from aura.corpus import shards, tokenizer
from aura.corpus.progress import Bars
from aura.corpus.shards import Workplace, workplace
from aura.corpus.sources import HubDataset, LocalFiles, Source
from aura.corpus.tokenizer import Prepared
from aura.corpus.work import Settings, Work, say
from aura.errors import ConfigError, DataError, Parser

WORTH_WORKERS = 8_000_000  # bytes of input; below, starting processes costs more than they save


def prepare(
    inputs: list[Path], output: Path, vocab_size: int, validation_fraction: float = 0.01
) -> corpora.Corpus:
    """`build` for local files and a tokenizer that is trained on them, in this process."""
    return build(LocalFiles(inputs), output, Settings(vocab_size, validation_fraction))


def build(source: Source, output: Path, settings: Settings) -> corpora.Corpus:
    """Build the corpus in `output`, go on with it, or return the one that is there when it is of the same text.

    The result depends only on the text and the settings: two runs give the same bytes, whatever the number of
    workers, interrupted or not. It appears in `output` all at once. Raises DataError, ConfigError.
    """
    settings.check()
    loaded = tokenizer.load(settings.tokenizer, say) if settings.tokenizer else None
    bars = Bars()
    with bars.progress:
        request = _request(source, settings, loaded, bars)
        if output.exists() and (existing := _existing(output, request)):
            Workplace(output).remove_leftovers()
            return existing
        with workplace(output) as place:
            journal = place.read_journal(request)
            cut = journal["cut"] if journal else int(settings.validation_fraction * 2**64)
            work = Work(source, settings, place, request, bars, cut)
            if journal:
                work.go_on(journal)
                say(f"Going on behind {work.tokens():,} tokens that are in {place.path}.")
            else:
                work.begin(loaded)
            work.run()
            if work.one_split_is_empty():
                # At least one document is for validation, however few there are.
                place.start_again()
                work = Work(source, settings, place, request, bars, cut=work.smallest)
                work.begin(loaded)
                work.run()
                if work.one_split_is_empty():
                    raise DataError("too_little_text_for", name=source.name, tokens=settings.max_tokens)
            meta = work.meta()
            meta["fingerprint"] = corpora.fingerprint_of(meta)
            shards.write(place.corpus / corpora.META, json.dumps(meta, indent=1))
            place.finish()
    return corpora.read_corpus(output)


def _request(source: Source, settings: Settings, loaded: Prepared | None, bars: Bars) -> dict[str, Any]:
    """What the corpus follows from: equal requests, equal corpora."""
    request = source.identity(bars.start("Reading", source.size))
    if loaded:
        request["tokenizer_sha256"] = hashlib.sha256(loaded.json.encode()).hexdigest()
    else:
        request["vocab_size"] = settings.vocab_size
    if settings.max_tokens:
        request["max_tokens"] = settings.max_tokens
    return request | {"validation_fraction": settings.validation_fraction}


def _existing(output: Path, request: dict[str, Any]) -> corpora.Corpus | None:
    """The corpus in `output` when it comes from the same text; None for an empty directory."""
    if output.is_dir() and not any(output.iterdir()):
        return None
    if not (output / corpora.META).is_file():
        raise DataError("output_is_no_corpus", path=output)
    existing = corpora.verify(output)
    if {key: value for key, value in existing.source.items() if key != "documents"} != request:
        raise DataError("output_is_other_corpus", path=output, fingerprint=existing.fingerprint[:12])
    return existing


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if (arguments.input is None) == (arguments.dataset_name is None):
        raise ConfigError("input_or_dataset")
    column = arguments.dataset_column
    source: Source
    for path in arguments.input or [Path(arguments.dataset_name)]:
        if path.is_dir() and arguments.output.resolve().is_relative_to(path.resolve()):
            raise ConfigError("output_in_input", output=arguments.output, path=path)
    if arguments.input:
        source = LocalFiles(arguments.input, column, arguments.documents_per_line)
    else:
        source = HubDataset(
            arguments.dataset_name,
            arguments.dataset_config,
            arguments.dataset_split,
            column,
            arguments.dataset_revision,
        )
    small = source.size is not None and source.size < WORTH_WORKERS
    settings = Settings(
        vocab_size=arguments.vocab_size,
        validation_fraction=arguments.validation_fraction,
        tokenizer=arguments.tokenizer,
        max_tokens=arguments.dataset_max_tokens,
        max_errors=arguments.max_errors,
        workers=arguments.workers or (1 if small else len(os.sched_getaffinity(0))),
    )
    existed = (arguments.output / corpora.META).exists()
    corpus = build(source, arguments.output, settings)
    if existed:
        say(f"{arguments.output} is up to date.")
    elif settings.vocab_size and corpus.vocab_size < settings.vocab_size:
        say(f"Note: the text gives no more than {corpus.vocab_size} token ids.")
    _say_what_there_is(corpus)
    return 0


def _say_what_there_is(corpus: corpora.Corpus) -> None:
    if any(corpus.skipped.values()):
        say(
            f"Left out: {corpus.skipped['broken']} broken places, {corpus.skipped['empty']} documents without text."
        )
    ratio = corpus.text_bytes / sum(corpus.tokens.values())
    say(
        f"{corpus.tokens['train']:,} training and {corpus.tokens['validation']:,} validation tokens "
        f"({ratio:.2f} bytes per token), vocabulary {corpus.vocab_size}.\n"
        f"Unigram entropy {corpus.unigram_entropy:.4f} nats per token; without any knowledge ln({corpus.vocab_size}) "
        f"= {math.log(corpus.vocab_size):.4f}.\n"
        f"Fingerprint {corpus.fingerprint}"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="aura prepare",
        description="Turn text into a corpus: train a byte-level BPE on it or take an existing tokenizer, encode it, "
        "divide it into training and validation. The same text and settings give the same fingerprint; a corpus that "
        "is up to date is left alone; after an interruption the same command goes on.",
    )
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
        "--dataset-name", metavar="NAME", help="wikipedia and c4 (Spanish), any other name, or a directory"
    )
    hub.add_argument("--dataset-config", metavar="NAME", help="configuration, for example 20231101.es")
    hub.add_argument("--dataset-split", default="train", metavar="NAME", help="split (train)")
    hub.add_argument("--dataset-revision", metavar="COMMIT", help="commit (what is newest now)")
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
    result = parser.add_argument_group("what comes out")
    result.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of the corpus")
    result.add_argument("--vocab-size", type=int, metavar="N", help="train a tokenizer with N token ids")
    result.add_argument(
        "--tokenizer",
        "--tokenizer-name-or-path",
        metavar="PATH",
        help="or take this one: tokenizer.json, SentencePiece .model, a directory with one of them or with vocab.json "
        "and merges.txt, a name on the hub",
    )
    result.add_argument(
        "--validation-fraction",
        "--validation-split",
        type=float,
        default=0.01,
        metavar="PART",
        help="part of the documents (0.01)",
    )
    return parser
