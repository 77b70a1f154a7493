"""`aura compare`: two and more runs side by side, by what each has written down. Standard library only.

Losses per token compare with one tokenizer only, bits per byte with all, if the validation text is the same.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from aura.commands.named import places
from aura.config import BEFORE
from aura.errors import ConfigError, DataError, Parser
from aura.run.runlog import LOG, MODEL_CONFIG, OF_PART
from aura.texts.console import duration, print_table, text

POINTS = 5  # of the curves, each at half the tokens of the one after it
# What is in the table already, and what changes nothing of what is learnt or of how fast.
NOT_COMPARED = (
    *("preset", "family", "vocab_size", "steps", "log_every", "validate_every", "save_every"),
    *("keep_checkpoints", "keep_every", "collective_timeout"),
)


@dataclass(frozen=True)
class Point:
    """A validation."""

    tokens: float
    seconds: float  # in steps: without starts, validations and checkpoints
    bits: float  # per byte
    parts: dict[str, float] = field(default_factory=dict)  # those of a mixture's parts


@dataclass(frozen=True)
class Run:
    """None: it does not say."""

    name: str
    settings: dict[str, Any]
    parameters: int
    vocabulary: int
    corpus: str  # its fingerprint
    tokenizer: str  # its SHA-256
    ranks: int | None  # of the last attempt
    on_gpu: bool
    step: int
    tokens: int
    seconds: float
    validation_loss: float | None  # nats per token
    curve: list[Point]

    @property
    def best(self) -> Point | None:
        return min(self.curve, key=lambda point: point.bits, default=None)

    @property
    def parts(self) -> dict[str, float]:
        """Bits per byte of a mixture's parts at the end."""
        return self.curve[-1].parts if self.curve else {}

    def bits_at(self, tokens: float) -> float:
        """Between two validations in a straight line over the logarithm of the tokens."""
        for before, after in pairwise(self.curve):
            if before.tokens <= tokens <= after.tokens:
                part = math.log(tokens / before.tokens) / math.log(after.tokens / before.tokens)
                return before.bits + part * (after.bits - before.bits)
        return self.curve[0 if tokens <= self.curve[0].tokens else -1].bits

    def reaches(self, bits: float) -> Point:
        """Where the curve comes there first; it must."""
        if self.curve[0].bits <= bits:
            return self.curve[0]
        before, after = next(pair for pair in pairwise(self.curve) if pair[1].bits <= bits)
        part = (before.bits - bits) / (before.bits - after.bits)
        tokens = before.tokens * (after.tokens / before.tokens) ** part
        time = (tokens - before.tokens) / (after.tokens - before.tokens)
        return Point(tokens, before.seconds + time * (after.seconds - before.seconds), bits)


def main(argv: list[str]) -> int:
    parser = Parser(prog="aura compare", description="Show two and more runs side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory, or its name in runs/")
    parser.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        raise ConfigError("compare_two")
    names = [path.resolve().name for path in arguments.runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in arguments.runs]
    runs = [read(path, name) for path, name in zip(arguments.runs, names, strict=True)]
    with_curve = [run for run in runs if run.curve]
    points = _points(with_curve)
    target = max((run.best.bits for run in with_curve if run.best), default=None)
    if arguments.json:
        print(json.dumps(_as_json(runs, points, target), indent=2))
        return 0
    print_table([["", *(run.name for run in runs)], *_rows(runs)])
    for sentence in _notes(runs):
        print(sentence)
    if len(with_curve) < 2 or target is None:
        return 0
    if points:
        head = [text("compare_at"), *(run.name for run in with_curve)]
        print_table(
            [head, *([_short(at), *(f"{run.bits_at(at):.4f}" for run in with_curve)] for at in points)]
        )
    print(*_sentences(with_curve, target), sep="\n")
    return 0


def read(path: Path, name: str) -> Run:
    """Raises ConfigError where there is no run, DataError where its files are damaged."""
    there = [place for place in places(path) if (place / MODEL_CONFIG).is_file()]
    if not there:
        raise ConfigError("compare_no_run", path=path, file=MODEL_CONFIG)
    path = there[0]
    try:
        model = json.loads((path / MODEL_CONFIG).read_text(encoding="utf-8"))
        ranks, on_gpu = _ranks(path)
        steps, tokens, seconds, loss, curve = _read_log(path)
        return Run(
            name,
            BEFORE | json.loads((path / "config.json").read_text(encoding="utf-8")),
            int(model["parameters"]),
            int(model["tokenizer_vocab_size"]),
            str(model["corpus_fingerprint"]),
            str(model["tokenizer_sha256"]),
            *(ranks, on_gpu, steps, tokens, seconds, loss, curve),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("compare_damaged", path=path, error=error) from None


def _ranks(path: Path) -> tuple[int | None, bool]:
    """How many trained, and whether on GPUs; as the rank of this disk has it."""
    said = [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(path.glob("rank-*/status.json"))[:1]
    ]
    if not said or not said[0].get("world_size"):
        return None, False
    return said[0]["world_size"] - len(said[0].get("away") or ()), said[0]["device"] != "cpu"


def _read_log(path: Path) -> tuple[int, int, float, float | None, list[Point]]:
    """Step, tokens, seconds, validation loss at the end; and every validation."""
    if not (path / LOG).is_file():
        raise ConfigError("compare_no_log", path=path, file=LOG)
    with (path / LOG).open(encoding="utf-8", newline="") as file:
        # Of a killed process the last line may be broken.
        rows = [row for row in csv.DictReader(file) if None not in row.values() and None not in row]
    if not rows:
        raise ConfigError("compare_no_log", path=path, file=LOG)
    epoch, of_epoch, seconds, loss, curve = "", 0.0, 0.0, None, []
    for row in rows:
        if row["epoch"] != epoch:
            epoch, of_epoch = row["epoch"], 0.0
        here = float(row["seconds"] or of_epoch)  # since the epoch began
        seconds, of_epoch = seconds + here - of_epoch, here
        tokens = int(row["tokens_seen"])
        loss = float(row["validation_loss"]) if row["validation_loss"] else loss
        if bits := row.get("bits_per_byte"):
            parts = {
                name.removeprefix(OF_PART): float(cell)
                for name, cell in row.items()
                if name.startswith(OF_PART) and cell
            }
            curve.append(Point(tokens, seconds, float(bits), parts))
    return int(rows[-1]["step"]), tokens, seconds, loss, curve


def _points(runs: Sequence[Run]) -> list[float]:
    """Tokens up to the end of the shortest run, at which all have been validated."""
    if len(runs) < 2:
        return []
    first = max(run.curve[0].tokens for run in runs)
    last = min(run.curve[-1].tokens for run in runs)
    return [last / 2**k for k in reversed(range(POINTS)) if last / 2**k >= first]


def _rows(runs: Sequence[Run]) -> list[list[str]]:
    """Of the table: what each run is, what it took and what came of it, and the settings that differ."""

    def row(name: str, value: Callable[[Run], str | None]) -> list[str]:
        return [name, *(value(run) or text("unknown") for run in runs)]

    def best(run: Run) -> str | None:
        best = run.best
        return text("compare_best_at", bits=best.bits, tokens=_short(best.tokens)) if best else None

    def loss(run: Run) -> str | None:
        return None if run.validation_loss is None else f"{run.validation_loss:.4f}"

    def of_part(part: str) -> Callable[[Run], str]:
        return lambda run: f"{run.parts[part]:.4f}" if part in run.parts else "-"

    def speed(run: Run) -> str | None:
        return f"{run.tokens / run.seconds:,.0f}" if run.seconds else None

    def work(on_gpu: bool) -> Callable[[Run], str]:
        return lambda run: _hours(run) if run.on_gpu == on_gpu else "-"

    rows = [
        row(text("compare_preset"), lambda run: f"{run.settings['preset']} ({run.settings['family']})"),
        row(text("compare_parameters"), lambda run: f"{run.parameters:,}"),
        row(text("compare_vocabulary"), lambda run: f"{run.vocabulary:,}"),
        row(text("compare_steps"), lambda run: f"{run.step:,} / {run.settings['steps']:,}"),
        row(text("compare_tokens"), lambda run: _short(run.tokens)),
        row(text("compare_time"), lambda run: duration(run.seconds)),
    ]
    if any(run.on_gpu for run in runs):
        rows.append(row(text("compare_gpu_hours"), work(True)))
    if not all(run.on_gpu for run in runs):
        rows.append(row(text("compare_rank_hours"), work(False)))
    parts = dict.fromkeys(part for run in runs for part in run.parts)
    rows += [
        row(text("compare_speed"), speed),
        row(text("compare_loss"), loss),
        row(text("compare_bits"), lambda run: f"{run.curve[-1].bits:.4f}" if run.curve else None),
        *(row(text("compare_bits_of_part", part=part), of_part(part)) for part in parts),
        row(text("compare_best"), best),
    ]
    names = {name for run in runs for name in run.settings} - {*NOT_COMPARED}
    for name in sorted(names):
        if len({str(run.settings.get(name)) for run in runs}) > 1:
            rows.append([name, *(str(run.settings.get(name, "")) for run in runs)])
    return rows


def _notes(runs: Sequence[Run]) -> list[str]:
    """What stands in the way of a comparison."""
    notes = [text("compare_no_bits", run=run.name) for run in runs if not run.curve]
    if len({run.corpus for run in runs}) > 1:
        notes.append(text("compare_corpora"))
    if len({run.settings.get("validation_windows") for run in runs}) > 1:
        notes.append(text("compare_windows"))
    return notes


def _sentences(runs: Sequence[Run], target: float) -> list[str]:
    """What each run needed to the best figure of the run that came least far, the one with the fewest tokens first."""
    found = sorted(((run, run.reaches(target)) for run in runs), key=lambda pair: pair[1].tokens)
    least = found[0][1]
    sentences = []
    for run, point in found:
        values = {"tokens": _short(point.tokens), "time": duration(point.seconds)}
        sentences.append(text("compare_reaches", run=run.name, bits=target, **values))
        if point is not least:
            ratios = {"tokens": point.tokens / least.tokens, "time": point.seconds / least.seconds}
            sentences[-1] += text("compare_times", **ratios, run=found[0][0].name)
    return sentences


def _hours(run: Run) -> str:
    return text("unknown") if run.ranks is None else f"{run.ranks * run.seconds / 3600:.3g}"


def _short(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens < 1e7 else f"{tokens:.3g}".replace("e+", "e")


def _as_json(runs: Sequence[Run], points: Sequence[float], target: float | None) -> dict[str, Any]:
    """Seconds, tokens, and bits per byte; null where a run has no curve."""
    return {
        "runs": [asdict(run) for run in runs],
        "tokens": points,
        "bits_per_byte": [[run.bits_at(at) if run.curve else None for at in points] for run in runs],
        "target": target,
        "reached": [
            asdict(run.reaches(target)) if run.curve and target is not None else None for run in runs
        ],
    }
