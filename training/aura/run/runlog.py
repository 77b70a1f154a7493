"""What a run writes down for people: training_log.csv, a row per logged step, and model_config.json.

The log goes on after a restart: rows of steps that the resumed checkpoint does not know are cut off first, so that
every step is there once. A row is one write of one line; of a killed process at most the last line is broken, and
the next start drops it.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from aura import __version__
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.durable import replace_text, write_atomically
from aura.texts.console import text

LOG = "training_log.csv"
MODEL_CONFIG = "model_config.json"
PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "tensorboard", "psutil")


@dataclass(frozen=True)
class Row:
    """One line; what was not measured at this step is empty. Losses are nats per token."""

    step: int
    epoch: int  # from 1
    tokens_seen: int  # of the run
    loss: float | None  # of the training step; none before the first
    validation_loss: float | None = None
    lr: float | None = None
    gradient_norm: float | None = None  # before clipping
    tokens_per_second: float | None = None  # of all ranks, since the row before
    seconds: float | None = None  # in the steps of this epoch so far
    bits_per_byte: float | None = None  # the validation loss, whatever the tokenizer


COLUMNS = [column.name for column in fields(Row)]
HEADER = ",".join(COLUMNS) + "\n"
OF_PART = "bits_per_byte/"  # where the corpus is a mixture, one more column for each part, by its name


class RunLog:
    """Writes on rank 0 and is silent on the others. A full disk ends the log, not the training."""

    def __init__(
        self,
        path: Path,
        rank: int,
        resumed_step: int | None,
        say: Callable[[str], None],
        parts: Sequence[str] = (),
    ) -> None:
        """`resumed_step` is the step of the checkpoint that the run goes on from, None for a new run."""
        self.path, self.say, self.parts = path, say, parts
        self.descriptor: int | None = None
        if rank != 0:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A file that is a part may have any name; a comma in it would be one column more.
            names = [OF_PART + re.sub(r'[",\s]', "_", part) for part in parts]
            header = ",".join([*COLUMNS, *names]) + "\n"
            _cut(path, -1 if resumed_step is None else resumed_step, header, say)
            self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)

    def add(self, row: Row, of_parts: Mapping[str, float] | None = None) -> None:
        if self.descriptor is None:
            return
        cells = [*vars(row).values(), *((of_parts or {}).get(part) for part in self.parts)]
        values = ("" if value is None else str(value) for value in cells)
        line = (",".join(values) + "\n").encode()
        try:
            if os.write(self.descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _give_up(self, error: OSError) -> None:
        self.say(text("log_ends", path=self.path, error=error.strerror))
        self.close()


def _cut(path: Path, step: int, header: str, say: Callable[[str], None]) -> None:
    """Leave the header and the complete rows up to `step`, in a file that is there all the time."""
    old = path.read_bytes().decode(errors="replace") if path.exists() else ""
    if old and not old.startswith(header) and not header.startswith(old):
        aside = path.with_suffix(f".{path.stat().st_mtime_ns}.csv")
        path.rename(aside)
        say(text("log_set_aside", path=path, name=aside.name))
        old = ""
    new = header + "".join(
        line
        for line in old.removeprefix(header).splitlines(keepends=True)
        if line.endswith("\n") and line.count(",") == header.count(",") and _step_of(line) <= step
    )
    if new != old:
        replace_text(path, new)


def _step_of(line: str) -> float:
    """Infinity for what is no row."""
    word = line.partition(",")[0]
    return int(word) if word.isdecimal() else float("inf")


def write_model_config(run_dir: Path, config: TrainConfig, corpus: Corpus, parameters: int) -> None:
    """model_config.json: every setting, and what one needs to know to make this model again. Raises OSError."""
    content = {
        **asdict(config),
        "parameters": parameters,
        "corpus_fingerprint": corpus.fingerprint,
        "corpus_tokens": corpus.tokens,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "tokenizer_vocab_size": corpus.vocab_size,
        "versions": versions(),
    }
    write_atomically(run_dir / MODEL_CONFIG, content)


def versions() -> dict[str, str | None]:
    """Of everything that takes part; None for what is not installed."""
    # A release is installed as …/releases/<id>/venv.
    venv = Path(sys.prefix)
    found: dict[str, str | None] = {
        "release": venv.parent.name if venv.parent.parent.name == "releases" else None,
        "aura": __version__,
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
