"""Runs one of the loops in a process of its own and reads what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Nothing but training: no validation to speak of, no checkpoint but the last.
QUIET = {"validate_every": 10**6, "validation_windows": 1, "save_every": 10**6}

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    losses: list[float]  # nats per token, of every step
    seconds: list[float]  # the clock after every step
    validation_loss: float | None = None

    def steps_per_second(self, skip: int) -> float:
        """After `skip` steps, which may compile and warm up."""
        return (len(self.seconds) - 1 - skip) / (self.seconds[-1] - self.seconds[skip])


def run(command: list[str]) -> str:
    """What the command prints. Ends the benchmark with its output where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def spanish_text() -> Path:
    """The documentation corpus' text, fetched from Debian where it is not in the cache."""
    fetched = subprocess.run(
        [HERE.parent / "tests/lab/spanish-docs"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(fetched.stdout.splitlines()[-1])


def prepare_corpus(text: Path, directory: Path, vocabulary: int) -> Path:
    """The documentation corpus; more of it for validation than usual, so that small differences show."""
    corpus = directory / "corpus"
    command = [sys.executable, "-m", "aura", "prepare", "--input", str(text), "--output", str(corpus)]
    run([*command, "--vocab-size", str(vocabulary), "--validation-fraction", "0.05"])
    return corpus


def flags(settings: Settings) -> list[str]:
    """Settings as `aura train` takes them."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def ours(preset: str, corpus: Path, settings: Settings) -> Run:
    """`aura train` itself. TensorBoard's curve holds the loss of every step and the time when it was written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory, "run")
        command = [sys.executable, "-m", "aura", "train", "--preset", preset, "--corpus", str(corpus)]
        run([*command, "--run-dir", str(run_dir), *flags(settings)])
        curves = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
        curves.Reload()
        events = curves.Scalars("Loss/train_step")
        done = json.loads((run_dir / "done.json").read_text(encoding="utf-8"))
    return Run([e.value for e in events], [e.wall_time for e in events], done["validation_loss"])


def loop(script: str, preset: str, corpus: Path, settings: Settings, *more: str) -> Any:
    """What reference_loop.py or transformers_loop.py prints."""
    words = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, str(HERE / script), "--preset", preset, "--corpus", str(corpus)]
    return json.loads(run([*command, "--set", *words, *more]))


def reference(preset: str, corpus: Path, settings: Settings) -> Run:
    measured = loop("reference_loop.py", preset, corpus, settings)
    return Run(measured["losses"], [second for _, second in measured["points"]])


def write_results(name: str, results: Any) -> Path:
    """bench-results/<name>.json in the directory where make was called."""
    file = Path("bench-results", f"{name}.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return file
