"""The files of a run directory that say what the run is and that it is complete."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aura.checkpoint import manifest, store
from aura.config import BEFORE, TrainConfig
from aura.corpus.corpus import TOKENIZER, TOKENIZER_CONFIG, Corpus
from aura.durable import replace_text, write_atomically
from aura.errors import AuraError, ConfigError, reason_of, why_not_written
from aura.plan.setting import CHOSEN
from aura.run.runlog import write_model_config
from aura.texts.console import text

DONE = "done.json"
FINAL = "final"  # the model as `aura export` writes it


@contextmanager
def taken(run_dir: Path, alone: bool, holds: bool) -> Iterator[None]:
    """There, and this process `holds` it, alone or for the ranks beside it: two trainings would set each other's
    checkpoints aside.

    Raises AuraError; where it cannot be used, of several ranks one that starting again may help, so that the others go
    on without this disk.
    """
    refused = ConfigError if alone else AuraError
    if _is_a_model(run_dir):
        raise ConfigError("run_dir_is_a_model", path=run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(run_dir, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = os.open(run_dir, os.O_RDONLY)
    except OSError as error:
        raise refused("run_dir_unusable", path=run_dir, error=reason_of(error)) from None
    try:
        if holds:
            _hold(descriptor, run_dir)
        yield
    finally:
        os.close(descriptor)


def _is_a_model(path: Path) -> bool:
    """One that somebody has exported, or fetched: a run has files of the same names."""
    try:
        return "architectures" in json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _hold(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError("run_dir_taken", path=run_dir) from None
    except OSError:
        pass  # some file servers have no locks


@contextmanager
def without_stopping(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A full disk of one node does not end a run that others save."""
    try:
        yield
    except OSError as error:
        say(text("files_missing", path=run_dir, error=why_not_written(error)))


def describe(run_dir: Path, config: TrainConfig, corpus: Corpus, parameters: int, step_tokens: int) -> None:
    """config.json, model_config.json and the tokenizer with its special tokens. Raises OSError."""
    write_atomically(run_dir / "config.json", asdict(config))
    write_model_config(run_dir, config, corpus, parameters, step_tokens)
    files = {
        TOKENIZER: (corpus.path / TOKENIZER).read_text(encoding="utf-8"),
        TOKENIZER_CONFIG: json.dumps(corpus.special, indent=1) + "\n",
    }
    for name, content in files.items():
        # A start that was given up before its first checkpoint may have left that of another corpus.
        if not (run_dir / name).is_file() or (run_dir / name).read_bytes() != content.encode():
            replace_text(run_dir / name, content, flushed=True)


def write_done(run_dir: Path, config: TrainConfig, corpus: Corpus, state: dict[str, Any]) -> None:
    """`state`: of the last checkpoint. Raises OSError."""
    shown = ("step", "tokens_seen", "loss", "validation_loss", "first_validation_loss")
    done = {
        "config_digest": config.digest(),
        "corpus": corpus.fingerprint,
        "world_size": state["world_size"],
        "vocab_size": config.vocab_size,
        "unigram_entropy": corpus.unigram_entropy,
        "parameters_checksum": state["parameters_checksum"],
        "finished": time.time(),
        **{key: state["progress"][key] for key in shown},
    }
    write_atomically(run_dir / DONE, done)


def steps_done(run_dir: Path, config: TrainConfig, corpus: Corpus) -> int:
    """The steps of this very run, if it has been completed here, else 0. A mark of it that is missing is set."""
    try:
        done = json.loads((run_dir / DONE).read_text(encoding="utf-8"))
        if done["config_digest"] == config.digest() and done["corpus"] == corpus.fingerprint:
            return int(done["step"])
        if done["step"] != config.steps:
            return 0
    except (OSError, ValueError, KeyError):
        pass
    # A rank that ended between its last checkpoint and its done.json must not wait for ranks that are done.
    last = run_dir / "checkpoints" / f"checkpoint-step-{config.steps}"
    try:
        manifest.verify(last)
    except manifest.Damaged:
        return 0
    state = store.read_state(last)
    before = {name: (BEFORE | state["config"]).get(name) for name in asdict(config)}
    asked = asdict(config)
    if config.strategy == "auto":
        asked |= {name: before.get(name) for name in CHOSEN}
    asked["micro_batch"] = before["micro_batch"]  # only how it was computed
    if before != asked or state["corpus"] != corpus.fingerprint:
        return 0
    with suppress(OSError):  # a full disk: the next start writes it
        write_done(run_dir, config, corpus, state)
    return config.steps
