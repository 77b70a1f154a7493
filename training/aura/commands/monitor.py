"""`aura monitor`: load of this machine every few seconds, in the form that the guides show.

    [2024-05-21 22:13:04] CPU: 68.5% | RAM: 72.1% (47.9 GB / 66.4 GB) | RAM proceso: 2.3 GB
      - GPU 0 (NVIDIA RTX 4090) | Utilización: 89% | Memoria: 12.1 GB / 24.0 GB

GB are 2^30 bytes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import datetime

import psutil

from aura.check import monitor
from aura.errors import ConfigError, Parser
from aura.texts import console


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
    gpus = monitor.Gpus()
    if gpus.reason:
        print(console.text("no_gpus", reason=gpus.reason), file=sys.stderr, flush=True)
    try:
        psutil.cpu_percent()  # from here on the load is measured
        time.sleep(min(monitor.FIRST_INTERVAL, arguments.interval))
        while True:
            reading = monitor.read(gpus, arguments.pid)
            print(json.dumps(asdict(reading)) if arguments.json else "\n".join(lines(reading)), flush=True)
            if arguments.once:
                return 0
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0


def lines(reading: monitor.Reading) -> list[str]:
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


def _gpu_line(gpu: monitor.Gpu) -> str:
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
    return console.text("unknown") if count is None else f"{count / monitor.GIB:.1f} GB"
