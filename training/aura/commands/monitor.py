"""`aura monitor`: load of this machine every few seconds, in the form that the guides show.

    [2024-05-21 22:13:04] CPU: 68.5% | RAM: 72.1% (47.9 GB / 66.4 GB) | RAM proceso: 2.3 GB
      - GPU 0 (NVIDIA RTX 4090) | Utilización: 89% | Memoria: 12.1 GB / 24.0 GB

GB are 2^30 bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import psutil

from aura.check import monitor
from aura.commands import monitor_cluster
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
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="on the controller: all nodes, their GPUs and ranks",
    )
    parser.add_argument(
        "--inventory",
        "-i",
        type=Path,
        metavar="DIR",
        help="--cluster: another inventory than ansible.cfg names",
    )
    arguments = parser.parse_args(argv)
    if not arguments.interval >= 0.1:
        raise ConfigError("interval_wrong")
    if arguments.cluster:
        return of_the_cluster(arguments)
    gpus = monitor.Gpus()
    if gpus.reason:
        print(console.text("no_gpus", reason=gpus.reason), file=sys.stderr, flush=True)
    try:
        links = monitor.Links()
        psutil.cpu_percent()  # from here on the load is measured
        time.sleep(min(monitor.FIRST_INTERVAL, arguments.interval))
        while True:
            reading = monitor.read(gpus, links, arguments.pid)
            print(json.dumps(asdict(reading)) if arguments.json else "\n".join(lines(reading)), flush=True)
            if arguments.once:
                return 0
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0


def of_the_cluster(arguments: argparse.Namespace) -> int:
    """Prints the table of all nodes, again and again; a terminal shows the last one only.

    A node that does not answer is a line of the table, and no failure.
    """
    try:
        while True:
            began = time.monotonic()
            nodes = monitor_cluster.read(arguments.inventory)
            shown = json.dumps(nodes) if arguments.json else "\n".join(monitor_cluster.table(nodes))
            clear = "\033[H\033[2J" if sys.stdout.isatty() and not arguments.once else ""
            print(clear + shown, flush=True)
            if arguments.once:
                return 0
            time.sleep(max(0.0, arguments.interval - (time.monotonic() - began)))
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
