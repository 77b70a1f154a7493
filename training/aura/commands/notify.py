"""`aura notify`: tells a person what runs do, and what `aura watch` has found.

It follows the files that ranks write anyway; nobody who trains waits for it, or for a network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from aura.durable import write_atomically
from aura.errors import EXIT_OK, EXIT_TEMPORARY, FOR_GOOD, ConfigError, Parser
from aura.texts.console import put, text
from aura.watch.events import INFO, Event, this_node
from aura.watch.faults import VARIABLE
from aura.watch.findings import read_findings
from aura.watch.runs import Seen, is_alive, news, report_leaderless, runs_on, statuses
from aura.watch.sender import Sender
from aura.watch.services import Services, is_open, read_services

PAUSE = 2.0  # seconds between two looks
LAST_WORDS = 60.0  # most seconds that a notifier of one run goes on, once the run is over


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    path = arguments.webhook_config or _credential()
    services = read_services(path)
    if is_open(path):
        put(text("webhooks_open", path=path))
    if arguments.check:
        return EXIT_OK
    if arguments.test:
        return _test(services, arguments.node)
    # A service that is stopped ends between two rounds: nothing is told twice.
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    directory = arguments.state or arguments.runs / ".notify"
    try:
        follower = Follower(arguments, services, directory)
        while follower.round() and not stops:
            time.sleep(PAUSE)
    except OSError as error:
        put(text("notify_cannot_write", path=directory, reason=error.strerror))
        return EXIT_TEMPORARY
    return EXIT_OK


def beside(webhook_config: Path, run_dir: Path) -> None:
    """For a run that was started by hand: a process of its own, which ends after the run."""
    read_services(webhook_config)
    words = [
        "notify",
        "--webhook-config",
        str(webhook_config),
        "--runs",
        str(run_dir),
        "--until-gone",
        str(os.getpid()),
    ]
    subprocess.Popen([sys.executable, "-m", "aura", *words], stdin=subprocess.DEVNULL, start_new_session=True)


class Follower:
    """One look at everything, and one delivery, per round. `directory`: where it keeps what it has seen."""

    def __init__(self, arguments: argparse.Namespace, services: Services, directory: Path) -> None:
        self.runs, self.faults, self.me = arguments.runs, arguments.faults, arguments.node
        self.until_gone, self.once = arguments.until_gone, arguments.once
        self.sender = Sender(services, put)
        self.path = directory / "state.json"
        self.began, self.gone_at = time.time(), 0.0
        self.seen: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self.seen = dict(json.loads(self.path.read_text(encoding="utf-8")))
        if self.until_gone and not self.seen:  # what was found before this run is no news of it
            self.seen = {
                "finding": next((one for one, _ in reversed(list(read_findings(self.faults, "")))), "")
            }

    def round(self) -> bool:
        """Whether there is a next one. Raises OSError."""
        seen = {"runs": {}, "finding": self.seen.get("finding", "")}
        for event in [*self._of_runs(seen["runs"]), *self._of_gpus(seen)]:
            self.sender.tell(event)
        if seen != self.seen:
            write_atomically(self.path, seen)
            self.seen = seen
        self.sender.round()
        return not self.once and not self._is_over()

    def _of_runs(self, found: dict[str, Any]) -> list[Event]:
        """Every rank here is followed, and of a run is told what the one says that leads it: who takes the lead knows
        what there was before. That a rank was refused before it met the others only its own node knows."""
        known = self.seen.get("runs", {})
        events: list[Event] = []
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for rank, status in statuses(self.runs):
            run = rank.parent.absolute().name
            key = f"{run}/{rank.name}"
            seen, said = news(run, Seen(**known.get(key, {})), status, is_alive(status), self.began, now)
            if seen.leads:
                events += said
            elif status.get("attempt") is None and status.get("exit_code") in FOR_GOOD:
                message = text("rank_refused", run=run, node=self.me, reason=status.get("message"))
                events += [replace(event, message=message) for event in said if event.kind == "run.failed"]
            else:
                seen, said = report_leaderless(run, seen, status, now)
                events += said
            found[key] = vars(seen)
        return events

    def _of_gpus(self, found: dict[str, Any]) -> list[Event]:
        findings = list(read_findings(self.faults, found["finding"]))
        if findings:
            found["finding"] = findings[-1][0]
        return [event for _, event in findings]

    def _is_over(self) -> bool:
        """The run that this one was started for has gone, and all is told, or nobody takes it."""
        if not self.until_gone or runs_on(self.until_gone):
            return False
        self.gone_at = self.gone_at or time.monotonic()
        waited = time.monotonic() - self.gone_at
        return waited > PAUSE and (self.sender.is_idle() or waited > LAST_WORDS)


def _test(services: Services, node: str) -> int:
    """One message to each, now."""
    failed = False
    event = Event("test", INFO, text("notify_test", node=node), host=node)
    for service in services.services:
        trouble = service.send(event, services.cluster)
        failed = failed or bool(trouble)
        key = "test_failed" if trouble else "test_delivered"
        put(text(key, service=service.name, reason=trouble))
    if services.heartbeat_url:
        trouble = services.heartbeat()
        failed = failed or bool(trouble)
        put(text("no_heartbeat", reason=trouble) if trouble else text("heartbeat_taken"))
    return EXIT_TEMPORARY if failed else EXIT_OK


def _credential() -> Path:
    """What the unit was given; systemd says where."""
    if folder := os.environ.get("CREDENTIALS_DIRECTORY"):
        return Path(folder, "webhooks")
    raise ConfigError("webhook_config_missing")


def _parser() -> Parser:
    parser = Parser(
        prog="aura notify",
        description="Tell a person what runs do: they started, learn, have finished, failed or broken off; a rank "
        "has left or is back; a GPU is unhealthy. Follows the files below the runs' directory until it is stopped. "
        "Each message is tried three times.",
    )
    parser.add_argument(
        "--webhook-config",
        type=Path,
        metavar="FILE",
        help="webhooks.json: who is told, by which address (the unit's credential)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="the directory with the runs, or one run (runs)",
    )
    parser.add_argument("--state", type=Path, metavar="DIR", help="what was seen before (<runs>/.notify)")
    parser.add_argument(
        "--node",
        default=this_node(),
        metavar="NAME",
        help="this node (AURA_NODE, or the name of the machine)",
    )
    parser.add_argument(
        "--faults",
        type=Path,
        default=Path(os.environ.get(VARIABLE, "/run/aura-watch")),
        metavar="DIR",
        help=f"where aura watch says what it has found ({VARIABLE}, or /run/aura-watch)",
    )
    parser.add_argument(
        "--test", action="store_true", help="send one message to everybody now, and say who took it"
    )
    parser.add_argument("--check", action="store_true", help="only say whether the file is right")
    parser.add_argument("--once", action="store_true", help="one look and one delivery, then end")
    parser.add_argument("--until-gone", type=int, default=0, metavar="PID", help="end after this process")
    return parser
