"""The curves for TensorBoard, under the names that the guides use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from aura.errors import why_not_written
from aura.texts.console import text


class TensorBoardLogger:
    """Writes on the first rank of every node, and nowhere else. A full disk ends the curves, not the training."""

    def __init__(self, log_dir: Path, writes: bool, step: int, say: Callable[[str], None]) -> None:
        self.say = say
        self.writer: Any = None
        if writes:
            from torch.utils.tensorboard import SummaryWriter  # takes a while

            # What an attempt that was given up has written about later steps is hidden; from the beginning, also about
            # step 0, whose validation is made again.
            with self._or_give_up():
                self.writer = SummaryWriter(log_dir, purge_step=step + 1 if step else 0, flush_secs=5)

    def add(self, tag: str, value: float, x: int) -> None:
        if self.writer is not None:
            with self._or_give_up():
                self.writer.add_scalar(tag, value, x)

    def add_system(self, step: int, device: torch.device) -> None:
        """Load of this node's processor, memory and GPU (0 MB where there is none)."""
        used = 0
        if device.type != "cpu":
            free, total = torch.accelerator.get_memory_info(device)
            used = total - free
        self.add("System/CPU_percent", psutil.cpu_percent(), step)
        self.add("System/RAM_percent", psutil.virtual_memory().percent, step)
        self.add("System/GPU_VRAM_MB", used / 2**20, step)

    def add_epoch(self, epoch: int, train_loss: float, validation_loss: float, seconds: float) -> None:
        self.add("Loss/train_epoch", train_loss, epoch)
        self.add("Loss/val_epoch", validation_loss, epoch)
        self.add("Time/epoch_seconds", seconds, epoch)

    def flush(self) -> None:
        """Whoever is killed keeps what it has written before."""
        if self.writer is not None:
            with self._or_give_up():
                self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            with self._or_give_up():
                self.writer.close()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.say(text("tensorboard_ends", error=why_not_written(error)))
            self.writer = None
