"""How loaded this machine is, and its GPUs, at one moment (`aura monitor` shows it every few seconds).

The memory of processes is that of the `aura train` processes of this machine, or of those that are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import PurePath
from typing import Any

import psutil
import pynvml

GIB = 2**30
# A card that is asked for what it or its driver does not know.
NOT_TOLD = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_NoPermission,
)
FIRST_INTERVAL = 0.5  # seconds; the load of the processor is a mean over a time


@dataclass(frozen=True)
class Gpu:
    """None where the driver does not say."""

    index: int
    name: str
    load_percent: int | None
    used_bytes: int | None
    total_bytes: int | None
    error: str = ""
    temperature: int | None = None  # °C
    power_watts: float | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Link:
    """What a network card carries, both ways, since the reading before [Mbit/s]."""

    speed: int  # 0 where it does not say
    sent: float
    received: float


@dataclass(frozen=True)
class Reading:
    time: str  # local time of this machine, ISO 8601
    cpu_percent: float  # since the reading before
    ram_percent: float
    ram_used_bytes: int
    ram_total_bytes: int
    processes: dict[int, int]  # process id: resident bytes
    gpus: list[Gpu]
    links: dict[str, Link]  # by name, those that are up


class Links:
    """The network cards that are up, but for the loopback."""

    def __init__(self) -> None:
        self.at, self.counted = time.monotonic(), psutil.net_io_counters(pernic=True)

    def read(self) -> dict[str, Link]:
        now, counted = time.monotonic(), psutil.net_io_counters(pernic=True)
        cards, links, seconds = psutil.net_if_stats(), {}, max(now - self.at, 1e-3)
        for name, total in counted.items():
            before = self.counted.get(name)
            if name != "lo" and before and name in cards and cards[name].isup:
                sent, received = total.bytes_sent - before.bytes_sent, total.bytes_recv - before.bytes_recv
                links[name] = Link(
                    cards[name].speed, *(round(8e-6 * n / seconds, 3) for n in (sent, received))
                )
        self.at, self.counted = now, counted
        return links


class Gpus:
    """NVIDIA's GPUs; none without a driver, and then `reason` says why."""

    def __init__(self) -> None:
        self.count, self.reason = 0, ""
        try:
            pynvml.nvmlInit()
            self.count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.reason = str(error)

    def read(self) -> list[Gpu]:
        return [_read_gpu(index) for index in range(self.count)]


def _read_gpu(index: int) -> Gpu:
    """One that is lost answers nothing."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        load = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        temperature = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        milliwatts = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
        uuid = ask(pynvml.nvmlDeviceGetUUID, handle) or ""
    except pynvml.NVMLError as error:
        return Gpu(index, "", None, None, None, str(error))
    watts = None if milliwatts is None else milliwatts / 1000
    used, total = (memory.used, memory.total) if memory else (None, None)
    return Gpu(index, name, load and load.gpu, used, total, "", temperature, watts, uuid)


def ask(question: Callable[..., Any], *about: Any) -> Any:
    """None where this GPU does not say: laptops and chips that share the memory of the processor."""
    try:
        return question(*about)
    except NOT_TOLD:
        return None


def trains(words: list[str]) -> bool:
    """Is this the command line of an `aura train` process? torchrun, which starts some, is none."""
    options = list(takewhile(lambda word: word.startswith("-") and word != "-m", words[1:]))
    program = words[1 + len(options) :]
    if program[:1] == ["-m"]:
        program = program[1:]
    return program[1:2] == ["train"] and PurePath(program[0]).name == "aura"


def resident(pids: list[int]) -> dict[int, int]:
    """Resident bytes of these processes, or of all that train when none is named."""
    return {
        process.pid: process.info["memory_info"].rss
        for process in psutil.process_iter(["cmdline", "memory_info"])
        if (process.pid in pids if pids else trains(process.info["cmdline"] or []))
        and process.info["memory_info"]
    }


def read(gpus: Gpus, links: Links, pids: list[int]) -> Reading:
    memory = psutil.virtual_memory()
    return Reading(
        time=datetime.now().astimezone().isoformat(timespec="seconds"),
        cpu_percent=psutil.cpu_percent(),
        ram_percent=memory.percent,
        ram_used_bytes=memory.used,
        ram_total_bytes=memory.total,
        processes=resident(pids),
        gpus=gpus.read(),
        links=links.read(),
    )
