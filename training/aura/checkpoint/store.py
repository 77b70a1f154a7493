"""Checkpoints: complete or absent, checked when read, safetensors and JSON only.

    checkpoints/checkpoint-step-200/    (interrupt-step-N when the run was asked to stop; suspect-step-N when a GPU
                                        has turned out to be unhealthy: never gone on from, never rotated, never copied)
        model.safetensors       parameters under their names in aura/model
        optimizer.safetensors   <parameter>.exp_avg, .exp_avg_sq and .step of AdamW, .momentum of Muon
        state.json              step, position in the data, configuration, fingerprint of the corpus, the log up to
                                here, and the validation loss if it was measured at this very step
        manifest.json           SHA-256 and size of the three files above, and the attempt that wrote them

A checkpoint is written to a temporary directory, flushed to the disk and renamed; older ones go only after that.
Every node keeps its own copy. At the start the ranks agree on the newest (newest.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aura.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MODEL,
    NAME,
    OPTIMIZER,
    STATE,
    TEMPORARY,
    Damaged,
    checkpoints,
    step_of,
    verify,
)
from aura.checkpoint.newest import age, ballots_of, newest_valid, winner
from aura.cluster.ranks import Ranks
from aura.config import BEFORE, TrainConfig
from aura.corpus.corpus import Corpus, sha256_of
from aura.durable import publish
from aura.errors import ConfigError, NoCheckpoint
from aura.strategy.state import Allocate, in_memory
from aura.texts.console import text

DAMAGED, SUPERSEDED = "damaged-", "superseded-"
ASIDE = re.compile(rf"({DAMAGED}|{SUPERSEDED}){NAME.pattern}-(?P<when>\d+)")
# A checkpoint of a run with other values of these is another model or another order of the data.
FIXED = (
    *("family", "layers", "heads", "kv_heads", "d_model", "seq_len", "vocab_size", "vocab_multiple", "tied"),
    *("parameter_format", "optimizer", "moment_format", "seed"),
)

LARGE = 1 << 20  # bytes: what is smaller than so many stays in memory

State = dict[str, Any]
Report = Callable[[str], None]
Collect = Callable[[], dict[str, Tensor]]


class Saver:
    """Saves in the background: training waits only while its numbers are copied.

    One checkpoint is on its way at most. The optimizer's state of other ranks is collected in the background, too.
    """

    def __init__(self, directory: Path, keep: int, keep_every: int, keep_best: bool = True) -> None:
        self.directory, self.keep, self.keep_every, self.keep_best = directory, keep, keep_every, keep_best
        self.name = ""
        self.seconds = 0.0  # that collecting and writing took
        self.collecting = False  # which takes all ranks
        self.error: Exception | None = None
        self.thread = threading.Thread()

    def begin(self, name: str, parameters: dict[str, Tensor], collect: Collect, state: State) -> None:
        """The one before must have been waited for. parameters: a copy. collect: returns the optimizer's whole state.
        Training goes on at once."""

        def write_all(optimizer: dict[str, Tensor]) -> None:
            path = write(self.directory, name, parameters, optimizer, state)
            if NAME.fullmatch(name):  # what is suspect takes no place of what is good
                rotate(self.directory, self.keep, self.keep_every, path, self.keep_best)

        self._start(name, collect, write_all)

    def help(self, name: str, collect: Collect, error: Exception | None = None) -> None:
        """Collect for the others, and write nothing. error: why this rank would have to and cannot."""

        def refuse(_: dict[str, Tensor]) -> None:
            if error:
                raise error

        self._start(name, collect, refuse)

    @property
    def is_writing(self) -> bool:
        return self.thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Until the checkpoint is on the disk; False when it could not be written (`error` says why) or is not yet."""
        if self.thread.ident is not None:
            self.thread.join(seconds)
        return bool(self.name) and self.error is None and not self.thread.is_alive()

    def wait_without_others(self, seconds: float) -> None:
        """For what needs nobody else: a rank is gone."""
        if not self.collecting:
            self.wait(seconds)

    def _start(self, name: str, collect: Collect, use: Callable[[dict[str, Tensor]], None]) -> None:
        assert not self.thread.is_alive()
        self.name, self.error, self.collecting = name, None, True
        # A daemon: a rank that ends does not wait for an exchange that will never end.
        self.thread = threading.Thread(target=self._work, args=(collect, use), name="saver", daemon=True)
        self.thread.start()

    def _work(self, collect: Collect, use: Callable[[dict[str, Tensor]], None]) -> None:
        began = time.perf_counter()
        try:
            optimizer = collect()
            self.collecting = False
            use(optimizer)
        except Exception as error:  # whatever it is: without this, a save that failed would count as one
            # Its frames hold the copies, and so the room that the next try waits for.
            self.error = error.with_traceback(None)
        self.collecting = False
        self.seconds = time.perf_counter() - began


def has_room(size: int) -> bool:
    """May so many bytes of memory be taken?"""
    return size < 0.8 * psutil.virtual_memory().available


def room_for(size: int, directory: Path) -> Allocate:
    """Where copies of so many bytes go: into memory; where that has no room, into files of the directory that have no
    name, of which the kernel keeps in memory what it has room for."""
    return in_memory if has_room(size) else partial(_in_a_file, directory)


def _in_a_file(directory: Path, size: int) -> Tensor:
    """Raises OSError."""
    if size < LARGE:
        return in_memory(size)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a disk that fills up later would end the process
        mapped = f"/proc/self/fd/{file.fileno()}"
        return torch.from_file(mapped, shared=True, size=size, dtype=torch.uint8)


def write(
    directory: Path, name: str, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], state: State
) -> Path:
    """Write the checkpoint `name`, then return its path. Raises OSError, and then leaves nothing behind."""
    final, temporary = directory / name, directory / f"{name}{TEMPORARY}{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        save_tensors(parameters, temporary / MODEL)
        save_tensors(optimizer, temporary / OPTIMIZER)
        (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        files = {
            file: {"sha256": sha256_of(temporary / file), "bytes": (temporary / file).stat().st_size}
            for file in (MODEL, OPTIMIZER, STATE)
        }
        about = {"format": FORMAT, "step": state["step"]}
        about |= {key: state[key] for key in ("writer", "known") if key in state}
        (temporary / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=1), encoding="utf-8")
        publish(temporary, final)  # what has its name is of an attempt that was given up: the same step
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def rotate(directory: Path, keep: int, keep_every: int, newest: Path, keep_best: bool = True) -> None:
    """After `newest` is safe on the disk: keep it, the `keep` - 1 before it, those of multiples of `keep_every` and
    the one with the lowest validation loss (keep_best); of what was set aside the `keep` newest; remove everything
    else."""
    step = step_of(newest)
    older = sorted((path for path in checkpoints(directory) if step_of(path) < step), key=step_of)
    kept = {newest, *older[max(0, len(older) - (keep - 1)) :]}
    kept |= {path for path in older if keep_every and step_of(path) % keep_every == 0}
    losses = {path: loss for path in (*older, newest) if (loss := _validation_loss(path)) is not None}
    if losses and keep_best:
        kept.add(min(losses, key=lambda path: losses[path]))
    for path in directory.iterdir():
        # What somebody else has put there is not ours to remove.
        ours = NAME.fullmatch(path.name) or TEMPORARY in path.name
        if ours and path not in kept:
            remove(path)
    set_aside = {
        path: int(found["when"]) for path in directory.iterdir() if (found := ASIDE.fullmatch(path.name))
    }
    for path in sorted(set_aside, key=lambda path: set_aside[path], reverse=True)[keep:]:
        remove(path)


def remove(path: Path) -> None:
    """A checkpoint; a kill meanwhile leaves none that looks damaged, but what `tidy` removes."""
    gone = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")
    with suppress(OSError):  # as much of it as can be
        path.rename(gone)
        path = gone
    shutil.rmtree(path, ignore_errors=True)


def _validation_loss(path: Path) -> float | None:
    """Of the parameters in this checkpoint; None when it was saved between two validations or cannot be read."""
    try:
        return read_state(path).get("validation_loss")
    except (OSError, ValueError):
        return None


def read_state(path: Path) -> State:
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def load_parameters(path: Path, model: nn.Module) -> None:
    """Overwrite the parameters of `model` with those of a checkpoint."""
    sources = load_file(path / MODEL)
    for name, target in parameters_of(model).items():
        target.copy_(sources[name])


def agree_and_load(
    directories: Sequence[Path],
    model: nn.Module,
    load_optimizer: Callable[[dict[str, Tensor]], None],
    ranks: Ranks,
    check: Callable[[State], None],
    report: Report,
) -> State | None:
    """Put all ranks on one checkpoint, see `winner`; its state, or None when there is none.

    `directories`: where this rank may hold one. Ranks that lack it get it from the lowest rank that has it.
    `load_optimizer` takes what it needs of the optimizer's whole state. `check` may refuse the state, before any
    parameter is touched and alike on all ranks, by raising. Raises NoCheckpoint, alike on all ranks too.
    """
    found = newest_valid(directories, report)
    ballots = ballots_of(found, ranks)
    source = winner(ballots, ranks.nodes)
    if source is None or not (best := ballots[source]):
        refuse_to_lose(directories, ranks)
        return None
    lacking = [
        rank
        for rank, one in enumerate(ballots)
        if not one or (one.step, one.model) != (best.step, best.model)
    ]
    have = found is not None and ranks.rank not in lacking
    if found and found.step > best.step:
        report(text("stray_checkpoint", name=found.path.name, attempt=found.writer.attempt, step=best.step))
    # Of the source also where a rank has its own: of equal steps and parameters, two may say unlike things.
    own = (found.path / STATE).read_bytes() if found and ranks.rank == source else b""
    state: State = json.loads(ranks.broadcast_bytes(own, source))
    check(state)
    optimizer: dict[str, Tensor] = {}
    if found and have:
        load_parameters(found.path, model)
        load_optimizer(optimizer := load_file(found.path / OPTIMIZER))
    if lacking:
        if ranks.rank in (source, *lacking):
            who = {"source": ranks.name([source]), "others": ranks.name(lacking)}
            report(text("sends_checkpoint", step=best.step, **who))
        for tensor in parameters_of(model).values():
            ranks.send(tensor, source, lacking)
        received = ranks.send_tensors(optimizer, source, lacking)
        if not have:
            load_optimizer(received)
    return state


def refuse_to_lose(directories: Sequence[Path], ranks: Ranks) -> None:
    """Where none can be used, but some are there: a disk or memory that is at fault for a while would cost the run all
    that it has learnt. Raises NoCheckpoint."""
    told = ranks.all_of({"there": [str(directory) for directory in directories if checkpoints(directory)]})
    where = [f"{path} ({ranks.name([rank])})" for rank, one in enumerate(told) for path in one["there"]]
    if where:
        raise NoCheckpoint("all_refused", where=", ".join(where))


def tidy(directory: Path, step: int, number: int) -> None:
    """Before training goes on after `step` of attempt `number`: remove what a killed save left, and set aside what is
    newer.

    That is damaged, or of an attempt that the others have left behind; nobody must take it for newer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in sorted(checkpoints(directory), key=step_of):
        if step_of(path) <= step and age(path)[0] <= number:
            continue
        try:
            verify(path)
            _set_aside(path, SUPERSEDED)
        except Damaged:
            _set_aside(path, DAMAGED)


def check_resumable(state: State, config: TrainConfig, corpus: Corpus, world_size: int) -> list[str]:
    """Refuse a checkpoint of another model or other data; the other changes. Raises ConfigError."""
    before, now = BEFORE | state["config"], asdict(config)
    for name in FIXED:
        if before.get(name) != now[name]:
            values = {"name": name, "before": before.get(name), "now": now[name]}
            raise ConfigError("checkpoint_of_other_settings", step=state["step"], **values)
    if state["corpus"] != corpus.fingerprint:
        values = {"before": state["corpus"][:12], "path": corpus.path, "now": corpus.fingerprint[:12]}
        raise ConfigError("checkpoint_of_other_corpus", step=state["step"], **values)
    changes = [f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    if state["world_size"] != world_size:
        changes.append(f"ranks {state['world_size']} -> {world_size}")
    return changes


def go_back_to(checkpoint: Path) -> None:
    """Set aside what is newer, or has more steps, for good: the run shall go on from there."""
    for path in sorted(checkpoints(checkpoint.parent), key=step_of):  # the newest last, as it stays longest
        if step_of(path) > step_of(checkpoint) or age(path) > age(checkpoint):
            _set_aside(path, SUPERSEDED)


def _set_aside(path: Path, why: str) -> None:
    path.rename(path.with_name(f"{why}{path.name}-{time.time_ns()}"))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """And what is never trained, but belongs to the model."""
    return model.state_dict()


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Raises OSError."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(0o640)  # not its owner's alone: what copies runs is another user, in this group
    except SafetensorError as error:  # it wraps the error of the operating system in text
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else 0
        raise OSError(number, os.strerror(number) if number else str(error), str(path)) from None
