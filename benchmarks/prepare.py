"""`aura prepare` against the common recipe, side by side, on the same documents with the same tokenizer.

The recipe is nanoGPT's data/openwebtext/prepare.py, written here once more: `datasets.map` in as many processes as
there are cores, then a memmap that is filled from the result. Its tokenizer is called in its fastest form
(`encode_batch_fast`). Both must find the same number of tokens.

    python benchmarks/prepare.py --mb 10 100
    python benchmarks/prepare.py --mb 10 100 1000 --only aura      # is memory flat?

The input is real Spanish text (tests/lab/spanish-docs), one document of about 4 kB per line of a .jsonl, repeated up
to the size. Repetition would flatter whoever remembers words, so one in twenty has its letters exchanged: words that
occur nowhere else.

Speed is input size by the time of the whole process, start included. Memory is the highest sum over the process tree
of anonymous memory (Pss_Anon + Pss_Shmem: what processes share counts once, cached files do not count).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from measuring import aura, options, show, spanish_text

PROGRAMS = ("recipe", "aura")
CORES = len(os.sched_getaffinity(0))  # processes of either
NEW_WORDS = 0.05  # part of the words
VOCABULARY = 32000  # of the tokenizer of both


def documents_of(text: Path) -> list[str]:
    """As `aura prepare` cuts them."""
    from aura.corpus.sources import LocalFiles, Problems

    return list(LocalFiles([text]).documents(None, Problems(0, print), lambda count: None))


def write_input(path: Path, documents: list[str], size: int) -> int:
    """Returns the size in bytes, not much above `size`."""
    rng = random.Random(0)  # noqa: S311
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            words = documents[number % len(documents)].split(" ")
            if number:
                words = ["".join(rng.sample(w, len(w))) if rng.random() < NEW_WORDS else w for w in words]
            written += file.write(json.dumps({"text": " ".join(words).strip()}, ensure_ascii=False) + "\n")
            number += 1
    return path.stat().st_size


def memory_of(process: int) -> int:
    """Anonymous memory of a process and all below it [bytes]."""
    total, waiting = 0, [process]
    while waiting:
        folder = Path("/proc", str(waiting.pop()))
        try:
            waiting += map(int, (folder / "task" / folder.name / "children").read_text().split())
            for line in (folder / "smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return total


def measured(command: list[str]) -> tuple[float, int]:
    """Seconds and peak memory of a command."""
    start, peak = time.monotonic(), 0
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"} if __file__ in command else None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.1)
        seconds = time.monotonic() - start
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{errors.read()}{' '.join(command)} ended with {process.returncode}")
    return seconds, peak


def run(program: str, text: Path, tokenizer: Path, folder: Path) -> tuple[float, int, int]:
    """Seconds, peak memory [bytes], tokens."""
    if program == "recipe":
        found = measured([sys.executable, __file__, "--recipe", *map(str, (text, tokenizer, folder))])
        return *found, sum(file.stat().st_size // 2 for file in folder.glob("*.bin"))
    output = folder / "corpus"
    words = [f"--input={text}", f"--output={output}", f"--tokenizer={tokenizer}", f"--workers={CORES}"]
    found = measured([*aura("prepare"), *words])
    return *found, sum(json.loads((output / "meta.json").read_text())["tokens"].values())


def recipe(text: str, tokenizer_file: str, folder: str) -> None:
    """What people write: map, then memmap."""
    import datasets
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        ids = [[*encoding.ids, end] for encoding in encodings]
        return {"ids": ids, "len": [len(one) for one in ids]}

    dataset = datasets.load_dataset("json", data_files=text, split="train", cache_dir=f"{folder}/cache")
    splits = dataset.train_test_split(test_size=0.01, seed=2357, shuffle=True)
    encoded = splits.map(encode, batched=True, remove_columns=["text"], num_proc=CORES)
    for name, split in encoded.items():
        length = int(np.sum(split["len"], dtype=np.uint64))
        array = np.memmap(Path(folder, f"{name}.bin"), dtype=np.uint16, mode="w+", shape=(length,))
        parts, begin = min(1024, len(split)), 0
        for index in range(parts):
            part = split.shard(num_shards=parts, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(part["ids"])
            array[begin : begin + len(ids)] = ids
            begin += len(ids)
        array.flush()


def compare(given: Namespace, documents: list[str], folder: Path) -> list[list[str]]:
    from aura.corpus import tokenizer

    made, rows = folder / "tokenizer.json", []
    made.write_text(tokenizer.train(documents, VOCABULARY).json)
    for size in given.mb:
        text, counts = folder / f"{size}.jsonl", set()
        megabytes = write_input(text, documents, size * 10**6) / 1e6
        for program in [given.only] if given.only else PROGRAMS:
            with tempfile.TemporaryDirectory(dir=folder) as output:
                seconds, memory, tokens = run(program, text, made, Path(output))
            counts.add(tokens)
            speed = [f"{seconds:.1f}", f"{megabytes / seconds:.2f}"]
            rows.append([f"{megabytes:.0f} MB", program, *speed, f"{tokens:,}", f"{memory / 1e6:.0f} MB"])
        text.unlink()
        if len(counts) > 1:
            sys.exit("The two found different numbers of tokens.")
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--recipe"]:
        recipe(*sys.argv[2:])
        return 0
    parser = options(__doc__)
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100], help="sizes of the input (10 100)")
    parser.add_argument("--only", choices=PROGRAMS, help="no comparison")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        rows = compare(given, documents_of(given.text or spanish_text()), Path(folder))
    title = f"{CORES} processes each, vocabulary {VOCABULARY}, {NEW_WORDS:.0%} new words"
    show(title, ("input", "program", "seconds", "MB/s", "tokens", "peak memory"), rows, left=("program",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
