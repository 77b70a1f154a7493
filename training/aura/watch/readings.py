"""What one look at a machine's GPUs says. It is JSON too, one object per line: recorded, it can be looked at again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GpuReading:
    """None where the card or the driver does not say: GeForce cards count no ECC errors, and that is not 0."""

    uuid: str
    index: int
    name: str
    pci: str = ""  # as the kernel writes it: 0000:01:00
    lost: str = ""  # why it does not answer
    recovery_action: int | None = None  # of NVML: 0 none, 1 reset, 2 reboot, 3 drain, 4 drain and reset
    ecc: int | None = None  # uncorrectable errors since the driver was loaded
    remap_pending: bool | None = None  # a row of its memory is replaced at the next reset
    remap_failed: bool | None = None
    temperature: int | None = None  # °C, as the two that follow
    slowdown_at: int | None = None
    shutdown_at: int | None = None
    throttle: int | None = None  # why its clock is held back: NVML's bits
    pcie_width: int | None = None  # lanes in use
    load: int | None = None  # %


@dataclass(frozen=True)
class Reading:
    time: float  # seconds since the epoch
    boot: str  # the kernel's name for this start of the machine
    gpus: list[GpuReading]
    xids: list[tuple[str, int, str]] = field(default_factory=list)  # PCI address, number, the kernel's words
    cuda: list[tuple[str, str]] = field(default_factory=list)  # UUID ("" if unknown), what a rank's CUDA said
    answered: bool = True  # else the driver has not yet, and no card in `gpus` does not mean that one is gone


def reading_of(content: dict[str, Any]) -> Reading:
    """Of its JSON. Raises TypeError and KeyError for anything else."""
    lists = {
        "gpus": [GpuReading(**gpu) for gpu in content["gpus"]],
        "xids": [(str(pci), int(number), str(words)) for pci, number, words in content.get("xids", [])],
        "cuda": [(str(uuid), str(words)) for uuid, words in content.get("cuda", [])],
    }
    return Reading(**(content | lists))
