#!/usr/bin/env python3
"""`aura prepare` against the common recipe, side by side, on the same documents with the same tokenizer.

The recipe is nanoGPT's data/openwebtext/prepare.py, written here once more: `datasets.map` in as many processes as
there are cores, then a memmap that is filled from the result. Its tokenizer is called in its fastest form
(`encode_batch_fast`). Both must find the same number of tokens.

    python benchmarks/prepare.py --mb 10 100
    python benchmarks/prepare.py --mb 10 100 1000 --only aura      # is memory flat?

The input is real Spanish text (tests/lab/spanish-docs), one document of about 4 kB per line of a .jsonl, repeated up
to the size. Repetition would flatter whoever remembers words, so in every repetition a part of the words
(--new-words) has letters exchanged: words that occur nowhere else.

Speed is input size by the time of the whole process, start included. Memory is the highest sum over the process tree
of anonymous memory (Pss_Anon + Pss_Shmem: what processes share counts once, cached files do not count).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "training"))


@dataclass(frozen=True)
class Result:
    seconds: float
    memory: int  # bytes, at the highest
    tokens: int


def spanish_text() -> list[str]:
    """Documents as `aura prepare` cuts them."""
    from aura.corpus.sources import LocalFiles, Problems

    script = subprocess.run([ROOT / "tests/lab/spanish-docs"], stdout=subprocess.PIPE, text=True, check=True)
    source = LocalFiles([Path(script.stdout.splitlines()[-1])])
    return list(source.documents(None, Problems(0, print), lambda count: None))


def write_input(path: Path, documents: list[str], size: int, new_words: float) -> int:
    """Returns the size in bytes, not much above `size`."""
    rng = random.Random(0)  # noqa: S311
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for document in documents:
                words = document.split(" ")
                if written:  # the first time it is the text as it is
                    for number in range(len(words)):
                        if rng.random() < new_words:
                            words[number] = "".join(rng.sample(words[number], len(words[number])))
                written += file.write(
                    json.dumps({"text": " ".join(words).strip()}, ensure_ascii=False) + "\n"
                )
                if written >= size:
                    break
    return path.stat().st_size


def memory_of(process: int) -> int:
    """Anonymous memory of a process and all below it [bytes]."""
    total, waiting = 0, [process]
    while waiting:
        folder = Path("/proc", str(waiting.pop()))
        try:
            waiting += [
                int(child) for child in (folder / "task" / folder.name / "children").read_text().split()
            ]
            for line in (folder / "smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return total


def measured(command: list[str], environment: dict[str, str]) -> tuple[float, int]:
    """Seconds and peak memory of a command."""
    start, peak = time.monotonic(), 0
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.1)
        seconds = time.monotonic() - start
        if process.returncode:
            print(process.stderr.read() if process.stderr else "", file=sys.stderr)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, peak


def run_aura(text: Path, tokenizer: Path, folder: Path, cores: int) -> Result:
    output = folder / "corpus"
    command = [sys.executable, "-m", "aura", "prepare", "--input", str(text), "--output", str(output)]
    seconds, peak = measured(
        [*command, "--tokenizer", str(tokenizer), "--workers", str(cores)],
        {"PYTHONPATH": str(ROOT / "training")},
    )
    return Result(seconds, peak, sum(json.loads((output / "meta.json").read_text())["tokens"].values()))


def run_recipe(text: Path, tokenizer: Path, folder: Path, cores: int) -> Result:
    words = ["--recipe", str(text), str(tokenizer), str(folder), str(cores)]
    seconds, peak = measured(
        [sys.executable, __file__, *words],
        {"HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"},
    )
    return Result(seconds, peak, sum(file.stat().st_size // 2 for file in folder.glob("*.bin")))


def recipe(text: str, tokenizer_file: str, folder: str, cores: int) -> None:
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

    dataset = datasets.load_dataset("json", data_files=text, split="train")
    splits = dataset.train_test_split(test_size=0.01, seed=2357, shuffle=True)
    encoded = splits.map(encode, batched=True, remove_columns=["text"], num_proc=cores)
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


def main() -> int:
    if sys.argv[1:2] == ["--recipe"]:
        recipe(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100], help="sizes of the input (10 100)")
    parser.add_argument("--cores", type=int, default=cores, help=f"processes of either ({cores})")
    parser.add_argument("--vocab-size", type=int, default=32000, help="of the tokenizer of both (32000)")
    parser.add_argument("--new-words", type=float, default=0.05, help="part of the words (0.05)")
    parser.add_argument("--only", choices=("aura", "recipe"), help="no comparison")
    arguments = parser.parse_args()

    from aura.corpus import tokenizer

    documents = spanish_text()
    runners = {"recipe": run_recipe, "aura": run_aura}
    if arguments.only:
        runners = {arguments.only: runners[arguments.only]}
    print(
        f"{arguments.cores} processes each, vocabulary {arguments.vocab_size}, {arguments.new_words:.0%} new words\n"
    )
    print(
        "| input | program | seconds | MB/s | tokens | peak memory |\n| ---: | --- | ---: | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as name:
        folder = Path(name)
        made = folder / "tokenizer.json"
        made.write_text(tokenizer.train(documents, arguments.vocab_size).json)
        for size in arguments.mb:
            text = folder / f"{size}.jsonl"
            total = write_input(text, documents, size * 10**6, arguments.new_words)
            tokens = set()
            for program, run in runners.items():
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    result = run(text, made, Path(output), arguments.cores)
                tokens.add(result.tokens)
                print(
                    f"| {total / 1e6:.0f} MB | {program} | {result.seconds:.1f} | {total / 1e6 / result.seconds:.2f} "
                    f"| {result.tokens:,} | {result.memory / 1e6:.0f} MB |",
                    flush=True,
                )
            text.unlink()
            if len(tokens) > 1:
                print("The two found different numbers of tokens.", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
