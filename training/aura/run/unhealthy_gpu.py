"""What `aura watch` finds out about the GPU of this rank ends it: after a checkpoint that is marked as suspect, where
the rank gets that far, and without one where it hangs. The last good checkpoint stays as it is."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from aura.checkpoint.store import Saver
from aura.cluster.activity import Activity
from aura.errors import GpuFault
from aura.run.stop import StopSignal
from aura.watch.faults import PROCESSOR, directory_of_faults, fault_of

PAUSE = 1.0  # seconds between two looks
# Seconds in which the ranks end their step and save it, beside what both have taken lately, twice. A GPU that is lost
# computes no more, and whoever waits for it hangs.
PATIENCE = 120.0
# What CUDA says of hardware. Other errors of it may be a program's: those the watcher counts.
HARDWARE = re.compile(r"uncorrectable ECC|hardware stack error|GPU is lost|fallen off the bus", re.IGNORECASE)


def uuid_of(device: torch.device) -> str:
    """As nvidia-smi -L shows it."""
    if device.type != "cuda":
        return PROCESSOR
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def known_fault(device: torch.device) -> GpuFault | None:
    directory = directory_of_faults()
    return fault_of(directory, uuid_of(device)) if directory else None


def fault_in(error: Exception) -> GpuFault | None:
    """The GPU's own word for it, in an error of CUDA."""
    first = str(error).partition("\n")[0]
    return GpuFault("gpu_said", error=first) if HARDWARE.search(first) else None


def watch(
    device: torch.device,
    stop: StopSignal,
    activity: Activity,
    saver: Saver,
    end_now: Callable[[GpuFault], object],
) -> None:
    """From a thread: tell `stop`, and call `end_now` where the main thread does not get on."""

    def look(directory: Path) -> None:
        while not (fault := fault_of(directory, uuid_of(device))):
            time.sleep(PAUSE)
        stop.unhealthy = fault
        # On a slow link a step, and a checkpoint that is collected over it, may each take minutes.
        time.sleep(PATIENCE + 2 * (activity.report().usual + saver.seconds))
        end_now(fault)

    if directory := directory_of_faults():
        threading.Thread(target=look, args=(directory,), name="sick-gpu", daemon=True).start()
