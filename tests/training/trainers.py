"""Real trainer processes on loopback, each with its own directory, as if on its own node.

They are forked, because importing torch takes longer than what they do. A test can put a fault into one of them.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from aura.commands import cli
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.model.gpt import GPT
from aura.run import trainer as train
from ports import free_port
from services import wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FORK = multiprocessing.get_context("fork")
# A model that learns 20 steps in less than a second.
TINY = "--layers 1 --heads 2 --d-model 32 --seq-len 16 --vocab-size 300 --batch-size 2 --steps 20 --warmup-steps 4 "
TINY += "--log-every 5 --validate-every 10 --validation-windows 20 --save-every 5 --collective-timeout 30"

Fault = Callable[[], None]
Faults = dict[int, Fault]  # by rank


class Forked:
    """A process that writes what it says into a file. `seconds`: how long it may take."""

    process: BaseProcess
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8")

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    def wait_for(self, is_true: Callable[[], bool], what: str, seconds: float = 60) -> None:
        wait_until(is_true, seconds, lambda: f"not {what} after {seconds} s:\n{self.text}")

    def says(self, words: str, seconds: float = 60) -> None:
        self.wait_for(lambda: words in self.text, f"said {words!r}", seconds)

    def end(self, seconds: float = 60) -> int:
        """The exit code."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.text}")
        return self.process.exitcode


def speak_into(output: Path) -> None:
    """This process, from now on."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class Command(Forked):
    """A command of ours as a terminal starts it."""

    def __init__(self, output: Path, *words: str) -> None:
        self.output = output
        output.touch()
        self.process = FORK.Process(target=_work, args=({}, words, output, _as_in_a_terminal))
        self.process.start()

    def kill(self) -> None:
        """With its children."""
        if self.process.is_alive():
            for process in [*psutil.Process(self.pid).children(), psutil.Process(self.pid)]:
                process.kill()
        self.process.join()


class Trainer(Forked):
    """One rank. `fault` runs in its process before the trainer starts."""

    def __init__(
        self, node: Path, environment: dict[str, str], words: list[str], fault: Fault | None, run: str = "run"
    ) -> None:
        self.run_dir = node / run
        self.output = node / f"output-{time.monotonic_ns()}.txt"
        node.mkdir(exist_ok=True)
        self.output.touch()
        words = ["train", *words, "--run-dir", str(self.run_dir)]
        self.process = FORK.Process(target=_work, args=(environment, words, self.output, fault), daemon=True)
        self.process.start()

    @property
    def status(self) -> dict[str, Any]:
        (file,) = self.run_dir.glob("rank-*/status.json")
        return json.loads(file.read_text())

    @property
    def done(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "done.json").read_text())

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())

    def state(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_dir / "checkpoints" / name / "state.json").read_text())

    def files(self, name: str) -> tuple[bytes, bytes]:
        """Parameters and optimizer of a checkpoint, every bit of them."""
        path = self.run_dir / "checkpoints" / name
        return (path / "model.safetensors").read_bytes(), (path / "optimizer.safetensors").read_bytes()


def start(
    folder: Path,
    corpus: Corpus | list[Corpus],
    world_size: int,
    settings: str = "",
    faults: Faults | None = None,
    language: str = "en",
    one_disk: bool = False,
) -> list[Trainer]:
    """All ranks of a run in `folder`; `settings` come after TINY's. `corpus` may be a list with one per rank. one_disk:
    on one node, otherwise each has its own."""
    folder.mkdir(exist_ok=True)
    port = str(free_port())
    ranks = []
    for rank in range(world_size):
        of_rank = corpus[rank] if isinstance(corpus, list) else corpus
        node, local_rank = (0, rank) if one_disk else (rank, 0)
        environment = {"AURA_NODE": f"node{node}", "AURA_LANG": language}
        if world_size > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        tiny = TINY.replace("--steps 20 ", "") if re.search("--tokens|--epochs", settings) else TINY
        words = ["--preset", "gpt2-nano", "--corpus", str(of_rank.path), *tiny.split()]
        words += ["--join-timeout", "30", *settings.split()]
        ranks.append(Trainer(folder / f"node{node}", environment, words, (faults or {}).get(rank)))
    return ranks


def complete(ranks: list[Trainer]) -> list[Trainer]:
    for trainer in ranks:
        assert trainer.end() == 0, trainer.text
    return ranks


def stop_at(
    step: int, folder: Path, corpus: Corpus, world_size: int, settings: str = "", before: Fault | None = None
) -> list[Trainer]:
    """A run that every rank is asked to end in this step."""
    stop = both(before or both(), at_step(step, send_self(signal.SIGTERM)))
    return complete(start(folder, corpus, world_size, settings, dict.fromkeys(range(world_size), stop)))


def stopped_and_resumed(
    folder: Path, corpus: Corpus, world_size: int, settings: str, step: int, faults: Faults | None = None
) -> list[Trainer]:
    """The ranks of a run without interruption. All have the same bits in the end, and the same as those of a run
    that was asked to stop in this step and started again."""
    straight = complete(start(folder / "straight", corpus, world_size, settings, faults))
    last = f"checkpoint-step-{straight[0].done['step']}"
    stop_at(step, folder / "stopped", corpus, world_size, settings)
    resumed = complete(start(folder / "stopped", corpus, world_size, settings))
    assert len({trainer.files(last) for trainer in (*straight, *resumed)}) == 1
    return straight


def curve(trainer: Trainer) -> dict[int, float]:
    """Loss/train_step by step, as TensorBoard shows it."""
    events = EventAccumulator(str(trainer.run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars("Loss/train_step")}


def before(owner: Any, name: str, act: Callable[..., object]) -> Fault:
    """act: gets what this function, or this method, is called with."""

    def apply_update() -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            act(*arguments)
            return original(*arguments)

        setattr(owner, name, wrapped)

    return apply_update


def at_step(step: int, act: Callable[[], None]) -> Fault:
    """Do something just before the optimizer step number `step` (from 1)."""

    def look(config: TrainConfig, number: int) -> None:
        if number + 1 == step:
            act()

    return before(train, "learning_rate", look)


def before_micro_batch(act: Callable[[GPT, int], None]) -> Fault:
    """act: gets the model and the number (from 1) of what it is to be trained on."""
    numbers = itertools.count(1)

    def look(model: GPT, *_: torch.Tensor) -> None:
        if model.training:
            act(model, next(numbers))

    return before(GPT, "loss_sum", look)


def both(*faults: Callable[[], None]) -> Fault:
    def apply_update() -> None:
        for fault in faults:
            fault()

    return apply_update


def infinite_gradient(number: int) -> Fault:
    """In this micro-batch the loss is good: only the backward pass goes wrong, as on a GPU with bad memory."""

    def spoil(model: GPT, now: int) -> None:
        if now == number:
            handle = model.h[0].mlp.c_fc.bias.register_hook(
                lambda gradient: (handle.remove(), gradient.index_fill(0, torch.tensor(3), math.inf))[1]
            )

    return before_micro_batch(spoil)


def after_each_step(act: Callable[[], None]) -> Fault:
    """act: at the end of every step, before its observers."""
    return before(train.Trainer, "commit", lambda *_: act())


def send_self(number: signal.Signals) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)
        if number in (signal.SIGSTOP, signal.SIGKILL):
            # It may be another thread that takes the signal, and a busy machine lets this one go on until then.
            time.sleep(1)

    return send


def _as_in_a_terminal() -> None:
    """nohup and a shell's & let the tests ignore these."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _work(environment: dict[str, str], words: Sequence[str], output: Path, fault: Fault | None) -> None:
    speak_into(output)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if fault:
        fault()
    # torch sets it where a test, or this fault, has imported its compiler.
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    raise SystemExit(cli.main([*words]))
