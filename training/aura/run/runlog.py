"""What a run writes down for people: training_log.csv, a row per logged step, and model_config.json.

The log goes on after a restart: rows of steps that the resumed checkpoint does not know are cut off first, so that
every step is there once. A row is one write of one line; of a killed process at most the last line is broken, and
the next start drops it. Every node keeps the whole log: one that was away gets what it has missed from the others.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from aura import __version__
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.durable import replace_text, write_atomically
from aura.errors import why_not_written
from aura.texts.console import text

if TYPE_CHECKING:
    from aura.cluster.ranks import Ranks  # with torch, which a controller has not

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
BY_OWN_CLOCK = ("tokens_per_second", "seconds")
OF_PART = "bits_per_byte/"  # before the name of a part, in the columns behind those


class RunLog:
    """Writes on the first rank of every node, and nowhere else. A full disk ends the log, not the training."""

    def __init__(
        self,
        path: Path,
        writes: bool,
        resumed_step: int | None,
        say: Callable[[str], None],
        parts: Sequence[str] = (),
    ) -> None:
        """`resumed_step` is the step of the checkpoint that the run goes on from, None for a new run."""
        self.path, self.say, self.parts = path, say, parts
        self.header = ",".join([*COLUMNS, *(OF_PART + part for part in parts)]) + "\n"
        self.descriptor: int | None = None
        self.lines: dict[int, str] = {}  # that were there, by step
        if not writes:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.lines = _cut(path, -1 if resumed_step is None else resumed_step, self.header, say)
            self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)

    def complete(self, ranks: Ranks) -> list[Row]:
        """Take what this node has missed from the others' logs, and return it. All ranks have to call this, and before
        any adds a row.

        Rows that differ are those of an attempt that was given up while a node was away: they become what most nodes
        have, and of as many the first.
        """
        own = self.lines if self.descriptor is not None else {}
        digest = hashlib.blake2b("".join(map(_of_all, own.values())).encode(), digest_size=7).digest()
        logs = ranks.gather([int(self.descriptor is not None), int.from_bytes(digest, "big")])
        holders: dict[int, list[int]] = {}  # of each log
        for rank, (writes, found) in enumerate(logs):
            if writes:
                holders.setdefault(found, []).append(rank)
        if len(holders) < 2:
            return []
        rows: dict[int, str] = {}
        for rank, *_ in sorted(holders.values(), key=lambda them: (-len(them), them[0])):
            file = self.header + "".join(own.values())
            rows = _lines(ranks.broadcast_bytes(file.encode(), rank).decode(), self.header) | rows
        if self.descriptor is None:
            return []
        try:
            replace_text(self.path, self.header + "".join(rows[step] for step in sorted(rows)))
            self.close()
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)
        return [self._row(rows[step]) for step in sorted(set(rows) - set(own))]

    def _row(self, line: str) -> Row:
        cells = _cells(line)
        own = {name: value for name, value in zip(COLUMNS, cells, strict=False) if value is not None}
        whole = {name: int(own.pop(name)) for name in ("step", "epoch", "tokens_seen")}
        of_parts = zip(self.parts, cells[len(COLUMNS) :], strict=True)
        parts = {part: bits for part, bits in of_parts if bits is not None}
        return Row(**whole, **{"loss": None, **own}, bits_of_parts=parts)  # type: ignore[arg-type]

    def add(self, row: Row) -> None:
        if self.descriptor is None:
            return
        of_parts = (row.bits_of_parts.get(part) for part in self.parts)
        cells = (*(getattr(row, name) for name in COLUMNS), *of_parts)
        values = ("" if value is None else str(value) for value in cells)
        line = (",".join(values) + "\n").encode()
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


def _cut(path: Path, step: int, header: str, say: Callable[[str], None]) -> dict[int, str]:
    """Leave the header and the complete rows up to `step`, in a file that is there all the time; these by step."""
    old = path.read_bytes().decode(errors="replace") if path.exists() else ""
    if old and not old.startswith(header) and not header.startswith(old):
        aside = path.with_suffix(f".{path.stat().st_mtime_ns}.csv")
        path.rename(aside)
        say(text("log_set_aside", path=path, name=aside.name))
        old = ""
    kept = {number: line for number, line in _lines(old, header).items() if number <= step}
    new = header + "".join(kept.values())
    if new != old:
        replace_text(path, new)
    return kept


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


def _of_all(line: str) -> str:
    """What all nodes write alike."""
    cells = line.split(",")
    return ",".join(cell for name, cell in zip_longest(COLUMNS, cells) if name not in BY_OWN_CLOCK)


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
