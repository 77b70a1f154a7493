"""What a prepared corpus is: a directory with a tokenizer, files of token ids, and meta.json that describes them.

    tokenizer.json        for tokenizers.Tokenizer.from_file; where it was trained here, a byte-level BPE
    train-00000.bin …     token ids, uint16, little-endian, no header; documents end with the end-of-text token
                          (uint32 with a vocabulary above 65,536)
    validation-00000.bin …  of a mixture validation-0-00000.bin … of its first part, and so on: `part` in meta.json
    meta.json             counts, SHA-256 of every file, fingerprint

The fingerprint is the SHA-256 of everything else in meta.json, but for what is only counted in the files: equal
fingerprints mean equal corpora, and a corpus keeps its own where a release counts more.
Standard library only, so that `aura fingerprint` answers at once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura.errors import DataError

FORMAT = "aura-corpus-1"
META = "meta.json"
TOKENIZER = "tokenizer.json"
# Beside it in a run and an exported model: which tokens are special
TOKENIZER_CONFIG = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 65536  # of a tokenizer that is trained here: uint16
COUNTED = ("text_bytes",)  # of every file, and in no fingerprint: earlier releases did not count them


def bytes_per_token(vocab_size: int) -> int:
    return 2 if vocab_size <= 65536 else 4


@dataclass(frozen=True)
class Corpus:
    path: Path
    fingerprint: str
    vocab_size: int  # token ids that the tokenizer can produce
    unigram_entropy: float  # of the training tokens: the best loss without context [nats per token]
    tokens: dict[str, int]  # per split
    # Per split: name, tokens, bytes, sha256, text_bytes (UTF-8, of its documents;
    # earlier releases did not count them); where a mixture is validated, the part
    files: dict[str, list[dict[str, Any]]]
    tokenizer_sha256: str
    source: dict[str, Any]  # digest of the text and the settings that it was prepared with
    bytes_per_token: int  # in the files
    text_bytes: int  # UTF-8, of all documents
    skipped: dict[str, int]  # places that could not be used, per kind
    special: dict[str, str]  # what transformers calls bos_token, eos_token and pad_token


def fingerprint_of(meta: dict[str, Any]) -> str:
    body = {key: value for key, value in meta.items() if key != "fingerprint"}
    body["files"] = {
        split: [{key: value for key, value in entry.items() if key not in COUNTED} for entry in files]
        for split, files in meta.get("files", {}).items()
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_meta(content: str | bytes, file: object) -> dict[str, Any]:
    """What meta.json says, checked against itself; `file` is what a sentence calls it. Raises DataError."""
    try:
        meta = json.loads(content)
    except ValueError as error:
        raise DataError("corpus_meta_damaged", file=file, error=error) from None
    made = meta.get("format") if isinstance(meta, dict) else None
    if made != FORMAT:
        raise DataError("corpus_format", path=file, format=made, wanted=FORMAT)
    if fingerprint_of(meta) != meta.get("fingerprint"):
        raise DataError("corpus_fingerprint_wrong", file=file)
    return meta


def checksums(meta: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of every file beside meta.json, by name."""
    return {TOKENIZER: meta["tokenizer_sha256"]} | {entry["name"]: entry["sha256"] for entry in entries(meta)}


def entries(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all files but meta.json and the tokenizer: name, bytes, sha256."""
    return [entry for files in meta["files"].values() for entry in files]


def read_corpus(path: Path) -> Corpus:
    """Read meta.json and check it against itself, the sizes of the files and the tokenizer; the other files' content is
    left to `verify`."""
    if not (path / META).is_file():
        raise DataError("no_corpus", path=path, file=META)
    meta = parse_meta((path / META).read_bytes(), path / META)
    for entry in entries(meta):
        file = path / entry["name"]
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            if size is None:
                raise DataError("corpus_file_missing", file=file)
            raise DataError("corpus_file_size", file=file, size=size, wanted=entry["bytes"])
    if not (path / TOKENIZER).is_file():
        raise DataError("corpus_file_missing", file=path / TOKENIZER)
    if sha256_of(path / TOKENIZER) != meta["tokenizer_sha256"]:  # a run keeps a copy of it
        raise DataError("corpus_file_damaged", file=path / TOKENIZER)
    return corpus_of(meta, path)


def corpus_of(meta: dict[str, Any], path: Path) -> Corpus:
    """Raises DataError."""
    if meta.get("window"):  # some of its ids carry a mark
        raise DataError("corpus_of_dialogues", path=path)
    return Corpus(
        path=path,
        fingerprint=meta["fingerprint"],
        vocab_size=meta["vocab_size"],
        unigram_entropy=meta["unigram_entropy"],
        tokens=meta["tokens"],
        files=meta["files"],
        tokenizer_sha256=meta["tokenizer_sha256"],
        source=meta["source"],
        # Corpora that were made before these were written down:
        bytes_per_token=meta.get("bytes_per_token", 2),
        text_bytes=meta["text_bytes"] if "text_bytes" in meta else meta["source"]["bytes"],
        skipped=meta.get("skipped", {}),
        special=special_of(meta),
    )


def special_of(meta: dict[str, Any]) -> dict[str, str]:
    """What ends a document begins the next."""
    end = meta.get("end_of_text", END_OF_TEXT)
    return {"bos_token": end, "eos_token": end, "pad_token": meta.get("pad", end)}


def check_vocabulary(corpus: Corpus, vocab_size: int, preset: str) -> None:
    """Has the model of that preset a row for every token? Raises DataError."""
    if corpus.vocab_size > vocab_size:
        raise DataError(
            "vocabulary_too_large",
            path=corpus.path,
            vocabulary=corpus.vocab_size,
            preset=preset,
            vocab_size=vocab_size,
        )


def verify(path: Path) -> Corpus:
    """read_corpus, and every byte of every file against its checksum."""
    corpus = read_corpus(path)
    for split in corpus.files.values():
        for entry in split:
            if sha256_of(path / entry["name"]) != entry["sha256"]:
                raise DataError("corpus_file_damaged", file=path / entry["name"])
    return corpus


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
