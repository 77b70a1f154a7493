"""What a run writes down for people: training_log.csv, a row per logged step, and model_config.json.

Every checkpoint, and every copy in memory, has the log up to its step. So it goes on after a restart with every step
there once, and a node that was away gets what it has missed with the checkpoint. A row is one write of one line.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from aura import __version__
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.durable import replace_text, write_atomically
from aura.errors import why_not_written
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
    bits_of_parts: dict[str, float] = field(default_factory=dict)  # of a mixture, with a column for each


COLUMNS = [column.name for column in fields(Row) if column.name != "bits_of_parts"]
OF_PART = "bits_per_byte/"  # before the name of a part, in the columns behind those


class RunLog:
    """Every rank knows the whole log, and the first one of every node writes it. A full disk ends the file, not the
    training."""

    def __init__(
        self,
        path: Path,
        writes: bool,
        kept: str | None,
        resumed_step: int | None,
        say: Callable[[str], None],
        parts: Sequence[str] = (),
    ) -> None:
        """`kept`: the log in the checkpoint that the run goes on from, `resumed_step` its step, None for a new run.
        Without `kept` (a checkpoint of an older release) the rows of this node's own file up to that step count."""
        self.path, self.say, self.parts = path, say, parts
        self.header = ",".join([*COLUMNS, *(OF_PART + part for part in parts)]) + "\n"
        self.descriptor: int | None = None
        self.rows = _lines(kept or "", self.header)  # by step
        self.missed: list[Row] = []  # while this node was away
        if not writes:
            if not self.rows and resumed_step is not None and path.exists():
                rows = _lines(path.read_text(encoding="utf-8", errors="replace"), self.header)
                self.rows = {step: line for step, line in rows.items() if step <= resumed_step}
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            own = self._own(-1 if resumed_step is None else resumed_step)
            self.rows = self.rows or own
            self.missed = [self._row(line) for step, line in self.rows.items() if step not in own]
            if not path.exists() or path.read_text(errors="replace") != self.text:
                replace_text(path, self.text)
            self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)

    @property
    def text(self) -> str:
        """As a checkpoint keeps it."""
        return self.header + "".join(self.rows.values())

    def _own(self, step: int) -> dict[int, str]:
        """What this node's file has up to `step`; one with other columns is set aside."""
        old = self.path.read_bytes().decode(errors="replace") if self.path.exists() else ""
        if old and not old.startswith(self.header) and not self.header.startswith(old):
            aside = self.path.with_suffix(f".{self.path.stat().st_mtime_ns}.csv")
            self.path.rename(aside)
            self.say(text("log_set_aside", path=self.path, name=aside.name))
            old = ""
        return {number: line for number, line in _lines(old, self.header).items() if number <= step}

    def _row(self, line: str) -> Row:
        cells = _cells(line)
        own = {name: value for name, value in zip(COLUMNS, cells, strict=False) if value is not None}
        whole = {name: int(own.pop(name)) for name in ("step", "epoch", "tokens_seen")}
        of_parts = zip(self.parts, cells[len(COLUMNS) :], strict=True)
        parts = {part: bits for part, bits in of_parts if bits is not None}
        return Row(**whole, **{"loss": None, **own}, bits_of_parts=parts)  # type: ignore[arg-type]

    def add(self, row: Row) -> None:
        of_parts = (row.bits_of_parts.get(part) for part in self.parts)
        cells = (*(getattr(row, name) for name in COLUMNS), *of_parts)
        values = ("" if value is None else str(value) for value in cells)
        self.rows[row.step] = ",".join(values) + "\n"
        if self.descriptor is None:
            return
        line = self.rows[row.step].encode()
        try:
            while line:  # of the rest it is said why it does not go in
                line = line[os.write(self.descriptor, line) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _give_up(self, error: OSError) -> None:
        self.say(text("log_ends", path=self.path, error=why_not_written(error)))
        self.close()


def _lines(log: str, header: str) -> dict[int, str]:
    """The whole ones, by step."""
    lines = (line for line in log.splitlines(keepends=True) if line.endswith("\n"))
    return {
        int(line.partition(",")[0]): line
        for line in lines
        if line.count(",") == header.count(",") and _is_row(line)
    }


def _is_row(line: str) -> bool:
    try:
        _cells(line)
    except ValueError:
        return False
    return line.partition(",")[0].isdecimal()


def _cells(line: str) -> list[float | None]:
    """Raises ValueError."""
    return [float(word) if word else None for word in line.rstrip("\n").split(",")]


def write_model_config(
    run_dir: Path, config: TrainConfig, corpus: Corpus, parameters: int, step_tokens: int
) -> None:
    """model_config.json: every setting, and what one needs to know to make this model again. Raises OSError."""
    content = {
        **asdict(config),
        "parameters": parameters,
        "step_tokens": step_tokens,  # of all ranks; a later launch with another number of them keeps it
        "corpus": str(corpus.path.resolve()),
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
