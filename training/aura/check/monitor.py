"""`aura monitor`: load of this machine every few seconds, in the form that the guides show.

    [2024-05-21 22:13:04] CPU: 68.5% | RAM: 72.1% (47.9 GB / 66.4 GB) | RAM proceso: 2.3 GB
      - GPU 0 (NVIDIA RTX 4090) | Utilización: 89% | Memoria: 12.1 GB / 24.0 GB

GB are 2^30 bytes. "RAM proceso" is the resident memory of the `aura train` processes of this machine, or of those
given with --pid.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import PurePath
from typing import Any

import psutil
import pynvml

from aura.errors import ConfigError, Parser
from aura.texts import console

GIB = 2**30
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


@dataclass(frozen=True)
class Reading:
    time: str  # local time of this machine, ISO 8601
    cpu_percent: float  # since the reading before
    ram_percent: float
    ram_used_bytes: int
    ram_total_bytes: int
    processes: dict[int, int]  # process id: resident bytes
    gpus: list[Gpu]


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
        load = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    except pynvml.NVMLError as error:
        return Gpu(index, "", None, None, None, str(error))
    return Gpu(index, name, load and load.gpu, memory and memory.used, memory and memory.total)


def _ask(question: Callable[[Any], Any], handle: Any) -> Any:
    """None where this GPU does not say: laptops and chips that share the memory of the processor."""
    try:
        return question(handle)
    except pynvml.NVMLError_NotSupported:
        return None


def trains(words: list[str]) -> bool:
    """Is this the command line of an `aura train` process? torchrun and launch-local, which start some, are none."""
    options = list(takewhile(lambda word: word.startswith("-") and word != "-m", words[1:]))
    program = words[1 + len(options) :]
    if program[:1] == ["-m"]:
        program = program[1:]
    return program[1:2] == ["train"] and PurePath(program[0]).name == "aura"


def resident(pids: list[int]) -> dict[int, int]:
    """Resident bytes of these processes, or of all that train when none is named."""
    found = {}
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        wanted = process.pid in pids if pids else trains(process.info["cmdline"] or [])
        if wanted and process.info["memory_info"]:
            found[process.pid] = process.info["memory_info"].rss
    return found


def read(gpus: Gpus, pids: list[int]) -> Reading:
    memory = psutil.virtual_memory()
    return Reading(
        time=datetime.now().astimezone().isoformat(timespec="seconds"),
        cpu_percent=psutil.cpu_percent(),
        ram_percent=memory.percent,
        ram_used_bytes=memory.used,
        ram_total_bytes=memory.total,
        processes=resident(pids),
        gpus=gpus.read(),
    )


def lines(reading: Reading) -> list[str]:
    processes = reading.processes
    system = console.text(
        "system",
        time=datetime.fromisoformat(reading.time).strftime("%Y-%m-%d %H:%M:%S"),
        cpu=reading.cpu_percent,
        ram=reading.ram_percent,
        used=_gigabytes(reading.ram_used_bytes),
        total=_gigabytes(reading.ram_total_bytes),
        process=_gigabytes(sum(processes.values())) if processes else console.text("no_process"),
    )
    return [system, *map(_gpu_line, reading.gpus)]


def _gpu_line(gpu: Gpu) -> str:
    if gpu.error:
        return console.text("gpu_failed", index=gpu.index, reason=gpu.error)
    return console.text(
        "gpu",
        index=gpu.index,
        name=gpu.name,
        load=console.text("unknown") if gpu.load_percent is None else f"{gpu.load_percent}%",
        used=_gigabytes(gpu.used_bytes),
        total=_gigabytes(gpu.total_bytes),
    )


def _gigabytes(count: int | None) -> str:
    return console.text("unknown") if count is None else f"{count / GIB:.1f} GB"


def main(argv: list[str]) -> int:
    parser = Parser(prog="aura monitor", description="Show the load of this machine every few seconds.")
    parser.add_argument(
        "--interval", type=float, default=5.0, metavar="N", help="seconds between two readings (5)"
    )
    parser.add_argument("--once", action="store_true", help="one reading only")
    parser.add_argument("--json", action="store_true", help="one JSON object per reading and line")
    parser.add_argument(
        "--pid", type=int, nargs="+", default=[], metavar="N", help="these processes, not those that train"
    )
    arguments = parser.parse_args(argv)
    if not arguments.interval >= 0.1:
        raise ConfigError("interval_wrong")
    gpus = Gpus()
    if gpus.reason:
        print(console.text("no_gpus", reason=gpus.reason), file=sys.stderr, flush=True)
    try:
        psutil.cpu_percent()  # from here on the load is measured
        time.sleep(min(FIRST_INTERVAL, arguments.interval))
        while True:
            reading = read(gpus, arguments.pid)
            print(json.dumps(asdict(reading)) if arguments.json else "\n".join(lines(reading)), flush=True)
            if arguments.once:
                return 0
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0
