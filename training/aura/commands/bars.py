"""What `aura prepare` shows of its progress, on stderr: how much was read, how fast, how long it takes.

Without a terminal, a line now and then.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from aura.texts.console import duration, put, text

SECONDS_PER_LINE = 30.0


class Bars:
    """A Listener (aura/corpus/listener.py) that speaks to a person."""

    def __init__(self) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description:24}"), *columns, console=console, disable=not console.is_terminal
        )

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress.tasks:
            self.progress.stop()

    def say(self, sentence: str) -> None:
        put(sentence)

    def warn(self, sentence: str) -> None:
        self.progress.stop()  # the terminal has its cursor again, also where the process ends behind this
        print(sentence, file=sys.stderr, flush=True)

    def start(self, description: str, size: int | None) -> Bar:
        """`size` in bytes, where it is known."""
        self.progress.start()  # not before there is something to show
        return Bar(self.progress, self.progress.add_task(description, total=size))


@dataclass
class Bar:
    progress: Progress
    task: TaskID
    skipped: float | None = None  # bytes that an earlier start had done
    told: float = field(default_factory=time.monotonic)

    def __call__(self, count: int) -> None:
        self.progress.advance(self.task, count)
        if self.progress.disable and time.monotonic() - self.told >= SECONDS_PER_LINE:
            print(self.line(), file=sys.stderr, flush=True)
            self.told = time.monotonic()

    def first_document(self) -> None:
        if self.skipped is None:
            self.skipped = self.progress.tasks[self.task].completed

    def expect(self, part: float) -> None:
        task, skipped = self.progress.tasks[self.task], self.skipped or 0
        task.total = skipped + (task.completed - skipped) / part  # progress.update would forget the speed

    def line(self) -> str:
        task = self.progress.tasks[self.task]
        words = f"{task.description}: {task.completed / 1e6:,.1f} MB"
        if task.total:
            words += text("bar_of", megabytes=task.total / 1e6)
        if task.speed:
            words += f", {task.speed / 1e6:,.1f} MB/s"
        if task.time_remaining is not None:
            words += text("bar_left", duration=duration(task.time_remaining))
        return f"{words}."
