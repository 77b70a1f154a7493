"""`aura watch`: looks after the GPUs of this machine, whether somebody trains on them or not.

A fault ends the rank on that card (it reads what is written here), and a person is told by `aura notify`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aura.durable import write_atomically
from aura.errors import EXIT_OK, EXIT_TEMPORARY, ConfigError, Parser, reason_of
from aura.texts.console import put, text
from aura.watch.events import CRITICAL, WARNING, Event, this_node
from aura.watch.faults import VARIABLE, is_known, write_fault
from aura.watch.findings import add_finding
from aura.watch.health import CUDA_WITHIN, Before, Finding, Past, begin_anew, forget, judge
from aura.watch.kernel_log import KernelLog, boot
from aura.watch.nvml import Gpus
from aura.watch.readings import Reading, reading_of
from aura.watch.runs import before_it, statuses

MEMORY = "gpus.json"


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if not arguments.interval >= 0.1:
        raise ConfigError("interval_wrong")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_OK))
    try:
        watcher = Watcher(arguments)
        for reading in _recorded(arguments.replay) if arguments.replay else watcher.readings():
            watcher.look(reading)
    except OSError as error:
        put(text("watch_cannot_write", path=error.filename, reason=error.strerror))
        return EXIT_TEMPORARY
    return EXIT_OK


class Watcher:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.path: Path = arguments.state / MEMORY
        self.gpus, self.without_gpus = Gpus(), ""
        self.log: KernelLog | None = None
        self.before: Before = {}
        self.boot, self.after, self.said = "", -1, set[str]()
        self.unwritten = ""  # why it cannot keep what it has seen
        # What is unreadable is forgotten: what still holds is found again.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.before = {uuid: Past(**past) for uuid, past in content["gpus"].items()}
            self.boot, self.after, self.said = content["boot"], content["after"], set(content["said"])

    def readings(self) -> Iterator[Reading]:
        """Until somebody ends it; one only with --once."""
        self._open_log()
        while True:
            gpus = self.gpus.read()
            if self.gpus.reason != self.without_gpus and self.gpus.reason:
                put(text("watch_no_gpus", reason=self.gpus.reason))
            self.without_gpus = self.gpus.reason
            xids = self.log.new() if self.log else []
            cuda, answered = self._errors_of_cuda(), self.gpus.answered
            reading = Reading(time.time(), boot(), gpus, xids, cuda, answered)
            if self.arguments.record:
                with self.arguments.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(reading)) + "\n")
            yield reading
            if self.arguments.once:
                return
            time.sleep(self.arguments.interval)

    def look(self, reading: Reading) -> None:
        """Say, write down and pass on what is new. Raises OSError where the fault or the message cannot be written."""
        for uuid, past in self.before.items():
            if reading.boot != self.boot:
                begin_anew(past)
            elif past.tripped and not is_known(self.arguments.faults, uuid):
                forget(past)
        findings = judge(self.before, reading)
        for finding in findings:
            self._tell(finding)
        self.boot, self.after = reading.boot, self.log.after if self.log else self.after
        reason = ""
        try:
            write_atomically(self.path, self._memory())
        except OSError as error:  # heat takes two looks, which one process has to have
            reason = reason_of(error)
            if reason != self.unwritten:
                put(text("watch_cannot_write", path=self.path, reason=reason))
        self.unwritten = reason

    def _tell(self, finding: Finding) -> None:
        put(f"{finding.sentence} {finding.remedy}")
        gpu, node = finding.gpu, self.arguments.node
        facts: dict[str, Any] = {
            "gpu": {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name},
            "fault": finding.kind,
        }
        facts |= {"key": f"{gpu.uuid}:{finding.kind}", "temperature": gpu.temperature, "ecc": gpu.ecc}
        if finding.trips:
            said = {
                "sentence": f"{node}: {finding.sentence}",
                "remedy": finding.remedy,
                "fault": finding.kind,
            }
            write_fault(self.arguments.faults, gpu.uuid, said)
        kind, severity = ("gpu.fault", CRITICAL) if finding.trips else ("gpu.warning", WARNING)
        event = Event(kind, severity, finding.sentence, finding.remedy, host=node, facts=facts)
        add_finding(self.arguments.faults, event)

    def _open_log(self) -> None:
        """After the records that were seen already, of this start of the machine."""
        try:
            self.log = KernelLog(self.after if self.boot == boot() else -1)
        except OSError as error:
            put(text("watch_kernel_unreadable", reason=error.strerror))

    def _errors_of_cuda(self) -> list[tuple[str, str]]:
        """Of the ranks here that have ended with one lately, each once."""
        found = []
        said = [status for _, now in statuses(self.arguments.runs) for status in (now, before_it(now))]
        for status in said:
            message, key = str(status.get("message")), f"{status.get('rank')} {status.get('updated')}"
            # Those that it took along say the same sentence, and end with another code.
            is_own = status.get("state") == "failed" and status.get("exit_code") == 1
            is_error = is_own and "CUDA error" in message and "out of memory" not in message
            # Those of long ago are not three in an hour, though the first look finds all of them.
            age = abs(time.time() - float(status.get("updated") or 0))
            if is_error and age < CUDA_WITHIN and key not in self.said:
                self.said.add(key)
                found.append((str(status.get("gpu") or ""), message))
        return found

    def _memory(self) -> dict[str, Any]:
        gpus = {uuid: vars(past) for uuid, past in self.before.items()}
        return {"gpus": gpus, "boot": self.boot, "after": self.after, "said": sorted(self.said)[-100:]}


def _recorded(path: Path) -> Iterator[Reading]:
    """Raises ConfigError for a file that is not there, and for a line that is no reading."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("replay_unreadable", path=path, reason=error.strerror) from None
    for number, line in enumerate(lines, start=1):
        try:
            yield reading_of(json.loads(line))
        except (ValueError, KeyError, TypeError):
            raise ConfigError("no_reading", path=path, number=number) from None


def _parser() -> Parser:
    parser = Parser(
        prog="aura watch",
        description="Look after the GPUs of this machine: lost ones, XIDs, memory errors, heat, PCIe, CUDA errors of "
        "ranks. A fault ends the rank on that GPU for good, after a checkpoint that is marked as suspect.",
    )
    parser.add_argument(
        "--state", type=Path, default=Path("watch"), metavar="DIR", help="what was seen before (watch)"
    )
    parser.add_argument(
        "--faults",
        type=Path,
        default=Path(os.environ.get(VARIABLE, "/run/aura-watch")),
        metavar="DIR",
        help=f"where ranks look for faults of their GPU, and aura notify ({VARIABLE}, or /run/aura-watch)",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="the directory with the runs (runs)"
    )
    parser.add_argument(
        "--node",
        default=this_node(),
        metavar="NAME",
        help="this node (AURA_NODE, or the name of the machine)",
    )
    parser.add_argument(
        "--interval", type=float, default=5.0, metavar="N", help="seconds between two looks (5)"
    )
    parser.add_argument("--once", action="store_true", help="one look only")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append every reading as a line of JSON")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="judge recorded readings, not this machine"
    )
    return parser
