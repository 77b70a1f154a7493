"""Ctrl+C and SIGTERM end `aura prepare` in every phase, and nothing is left where nothing can be continued. A long run
of characters does not make it quadratic."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aura.corpus.tokenizer import train

SECONDS = 5.0  # two on a machine that does nothing else
# Says when it is there; what follows takes a minute or more inside one call of a library.
PREPARE = """
import sys
from aura.commands import cli
from aura.corpus import encode, sources, tokenizer, work

def announced(function):
    def announces(*arguments):
        print("here", flush=True)
        return function(*arguments)
    return announces

tokenizer.LONGEST_PRE_TOKEN = work.BATCH_CHARS = 10**9
sources.digest_of = announced(sources.digest_of) if sys.argv[1] == "reading" else sources.digest_of
tokenizer.train = announced(tokenizer.train)
encode.Words.encode = announced(encode.Words.encode)
if __name__ == "__main__":
    sys.exit(cli.main(["prepare", *sys.argv[2:]]))
"""


def write_input(folder: Path, phase: str) -> list[str]:
    """The words behind `aura prepare`."""
    if phase == "reading":
        with (folder / "in.txt").open("wb") as file:
            file.truncate(1 << 36)  # no blocks, but bytes to read
        return ["--input", str(folder / "in.txt"), "--vocab-size", "1000"]
    texts = ["." * 600_000, "otro"] if phase == "training" else [f"{n}{'😀' * 300_000}" for n in range(30)]
    (folder / "in.jsonl").write_text(
        "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    )
    (folder / "tokenizer.json").write_text(train(["hola"], 300).json)
    which = (
        ["--vocab-size", "1000"] if phase == "training" else ["--tokenizer", str(folder / "tokenizer.json")]
    )
    return ["--input", str(folder / "in.jsonl"), *which]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("phase", "workers"), [("reading", 1), ("training", 1), ("encoding", 1), ("encoding", 2)]
)
def test_a_signal_is_answered_at_once_and_nothing_is_left(
    phase: str, workers: int, number: signal.Signals, tmp_path: Path
) -> None:
    script, folder = tmp_path / "prepare.py", tmp_path / "work"
    script.write_text(PREPARE)
    folder.mkdir()
    words = [*write_input(folder, phase), "--output", str(folder / "c"), "--workers", str(workers)]
    before = set(folder.iterdir())
    with subprocess.Popen(
        # A shell without job control starts what is in its background with SIGINT ignored.
        ["env", "--default-signal=INT", sys.executable, str(script), phase, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        assert any(line == "here\n" for line in process.stdout)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(number)
        began = time.monotonic()
        try:
            # The pipes end when the workers are gone, too.
            _, said = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"{number.name} is not heard in {SECONDS} s")
    print(f"{phase} with {workers}: {number.name} after {time.monotonic() - began:.2f} s")
    assert set(folder.iterdir()) == before
    killed = phase == "reading" and number == signal.SIGTERM  # before there is anything to tidy up
    assert process.returncode == (-number if killed else 128 + number)
    assert said == ("" if phase == "reading" else f"Nothing was left in {folder}.\n")


def test_a_long_run_of_characters_is_cut_for_training_only() -> None:
    made = json.loads(train(["." * 5000], 300).json)
    longest = max(made["model"]["vocab"], key=len)
    assert 500 < len(longest) <= 1000
    assert made["pre_tokenizer"]["type"] == "ByteLevel"
