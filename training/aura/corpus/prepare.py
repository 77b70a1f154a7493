"""Text in, a corpus out (see aura/corpus/corpus.py). docs/prepare.md explains it to its users.

The order of events:

1. Local files are read once for their SHA-256, which says whether this corpus exists already, or was begun.
2. The tokenizer is trained on the training documents, or an existing one is taken when a sample of the documents comes
   back from it (aura/corpus/round_trip.py).
3. The documents are read again, encoded, divided by their hash and written, each once.

A document goes to validation when its hash says so: the division does not depend on the names of the files or on
their order. Documents are read, encoded and written about a
megabyte at a time, so memory does not grow with the input; training the tokenizer holds the different words of its
sample, which ends at TOKENIZER_SAMPLE characters (aura/corpus/work.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura.corpus import corpus as corpora
from aura.corpus import tokenizer
from aura.corpus.listener import NOBODY, Listener
from aura.corpus.shards import Workplace, workplace
from aura.corpus.sources import Source
from aura.corpus.tokenizer import Prepared
from aura.corpus.work import Settings, Work
from aura.errors import DataError
from aura.storage.address import appears_at_once
from aura.texts import console

# What `source` in meta.json has beside the request: two corpora of the same text may differ in it, as one that was made
# before licences were written down.
FOR_PEOPLE = ("documents", "licence", "url", "parts", "duplicates")


@dataclass(frozen=True)
class Request:
    """What a corpus follows from: equal values, equal corpora."""

    values: dict[str, Any]
    tokenizer: Prepared | None  # the one that was named

    def check_same(self, meta_source: dict[str, Any], path: object, fingerprint: str) -> None:
        """Does the corpus in `path`, which says this of its source, come from the same? Raises DataError."""
        if {key: value for key, value in meta_source.items() if key not in FOR_PEOPLE} != self.values:
            raise DataError("output_is_other_corpus", path=path, fingerprint=fingerprint[:12])


def build(
    source: Source,
    output: Path,
    settings: Settings,
    listener: Listener = NOBODY,
) -> corpora.Corpus:
    """Build the corpus in `output`, go on with it, or return the one that is there when it is of the same text.

    The result depends only on the text and the settings: two runs give the same bytes, whatever the number of
    workers, interrupted or not. It appears in `output` all at once. Raises DataError, ConfigError.
    """
    if not (output / corpora.META).is_file():
        appears_at_once(output)  # before the text is read
    request = read_request(source, settings, listener)
    loaded, values = request.tokenizer, request.values
    if output.exists() and (existing := _existing(output, request)):
        Workplace(output).remove_leftovers()
        return existing
    with workplace(output, listener.warn) as place:
        journal = place.read_journal(values)
        cut = journal["cut"] if journal else int(settings.validation_fraction * 2**64)
        work = Work(source, settings, place, values, listener, cut)
        if journal:
            work.go_on(journal)
            listener.say(console.text("going_on_behind", tokens=work.tokens(), path=place.path))
        else:
            if loaded:
                work.check_tokenizer(loaded)
            work.begin(loaded)
        work.run()
        if work.one_split_is_empty():
            # At least one document is for validation, however few there are.
            place.start_again()
            tried, work = work.tried, Work(source, settings, place, values, listener, cut=work.smallest)
            work.tried = tried
            work.begin(loaded)
            work.run()
            if work.one_split_is_empty():
                raise DataError("too_little_text_for", name=source.name, tokens=settings.max_tokens)
        meta = work.meta()
        meta["fingerprint"] = corpora.fingerprint_of(meta)
        (place.corpus / corpora.META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        place.finish()
    return corpora.read_corpus(output)


def read_request(source: Source, settings: Settings, listener: Listener = NOBODY) -> Request:
    """Reads local files once. Raises DataError, ConfigError."""
    settings.check()
    loaded = tokenizer.load(settings.tokenizer, listener.say) if settings.tokenizer else None
    values = source.identity(listener.start(console.text("reading"), source.size))
    provenance = source.provenance()
    for about in provenance.get("parts", [provenance]):
        if "licence" in about:
            listener.say(console.text("licence", url=about["url"], licence=about["licence"]))
    if loaded:
        values["tokenizer_sha256"] = hashlib.sha256(loaded.json.encode()).hexdigest()
    else:
        values["vocab_size"] = settings.vocab_size
    if settings.max_tokens:
        values["max_tokens"] = settings.max_tokens
    return Request(values | {"validation_fraction": settings.validation_fraction}, loaded)


def _existing(output: Path, request: Request) -> corpora.Corpus | None:
    """The corpus in `output` when it comes from the same text; None for an empty directory."""
    if output.is_dir() and not any(output.iterdir()):
        return None
    if not (output / corpora.META).is_file():
        raise DataError("output_is_no_corpus", path=output)
    existing = corpora.verify(output)
    request.check_same(existing.source, output, existing.fingerprint)
    return existing
