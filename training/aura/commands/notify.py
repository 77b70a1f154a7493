"""`aura notify`: tells a person what runs, nodes and disks do, and what `aura watch` has found.

It follows the files that ranks write anyway; nobody who trains waits for it, or for a network.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from aura.errors import EXIT_OK, EXIT_TEMPORARY, FOR_GOOD, ConfigError, Parser
from aura.texts.console import put, text
from aura.watch.disk import look_at_disk
from aura.watch.events import INFO, Event, this_node
from aura.watch.lead import lead_of
from aura.watch.nodes import Nodes
from aura.watch.queue import Queue
from aura.watch.runs import Seen, is_alive, news, runs_on, statuses
from aura.watch.sender import Memory, Sender
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
    # A service that is stopped ends between two rounds: nothing is told twice, and the queue keeps what is left.
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
    """One look at everything, and one delivery, per round."""

    def __init__(self, arguments: argparse.Namespace, services: Services, directory: Path) -> None:
        self.runs, self.me = arguments.runs, arguments.node
        self.until_gone, self.once = arguments.until_gone, arguments.once
        self.queue, self.memory = Queue(directory), Memory(directory)
        self.sender = Sender(self.queue, services, self.memory, put)
        self.nodes = _nodes(self.me, arguments.nodes, self.memory)
        self.began, self.gone_at = time.time(), 0.0

    def round(self) -> bool:
        """Whether there is a next one. Raises OSError."""
        seen = self.memory.seen
        before = {key: dict(value) for key, value in seen.items()}
        events = [*self._of_runs(), *self._of_disk(), *(self.nodes.look() if self.nodes else [])]
        for event in events:
            self.queue.add(event)
        if self.nodes:
            seen["nodes"] = dict(self.nodes.misses)
        if seen != before:
            self.memory.save()  # after the queue has it: rather twice than never
        self.sender.round()
        return not self.once and not self._is_over()

    def _of_runs(self) -> list[Event]:
        """Every rank here is followed, and of a run is told what the one says that leads it: who takes the lead knows
        what there was before. That a rank was refused before it met the others only its own node knows."""
        known, found = self.memory.seen.get("runs", {}), {}
        events: list[Event] = []
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for rank, status in statuses(self.runs):
            run = rank.parent.absolute()
            key = f"{run.name}/{rank.name}"
            seen, said = news(run.name, Seen(**known.get(key, {})), status, is_alive(status), self.began, now)
            found[key] = vars(seen)
            if rank.name == f"rank-{lead_of(run).rank}":
                events += said
            elif status.get("attempt") is None and status.get("exit_code") in FOR_GOOD:
                message = text("rank_refused", run=run.name, node=self.me, reason=status.get("message"))
                events += [replace(event, message=message) for event in said if event.kind == "run.failed"]
        self.memory.seen["runs"] = found
        return events

    def _of_disk(self) -> list[Event]:
        was_full = bool(self.memory.seen.get("disk", {}).get("full"))
        is_full, events = look_at_disk(self.runs, self.me, was_full)
        self.memory.seen["disk"] = {"full": is_full}
        return events

    def _is_over(self) -> bool:
        """The run that this one was started for has gone, and all is told, or nobody takes it."""
        if not self.until_gone or runs_on(self.until_gone):
            return False
        self.gone_at = self.gone_at or time.monotonic()
        waited = time.monotonic() - self.gone_at
        return waited > PAUSE and (self.sender.is_idle() or waited > LAST_WORDS)


def _nodes(me: str, words: list[str], memory: Memory) -> Nodes | None:
    nodes = dict(word.partition("=")[::2] for word in words)
    if not all(nodes.values()) or (nodes and me not in nodes):
        raise ConfigError("notify_nodes_wrong", node=me)
    return Nodes(me, nodes, memory.seen.get("nodes", {})) if nodes else None


def _test(services: Services, node: str) -> int:
    """One message to each, now, without the queue."""
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
        description="Tell a person what runs do: they started, learn, have finished, failed or broken off; a node is "
        "lost or back, a disk is nearly full, a GPU is sick. Follows the files below the runs' directory until it is "
        "stopped. What cannot be delivered now waits on the disk.",
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
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="the queue and what was said (<runs>/.notify)"
    )
    parser.add_argument(
        "--node",
        default=this_node(),
        metavar="NAME",
        help="this node (AURA_NODE, or the name of the machine)",
    )
    parser.add_argument(
        "--nodes",
        nargs="+",
        default=[],
        metavar="NAME=ADDRESS",
        help="are they there? All of them, in order",
    )
    parser.add_argument(
        "--test", action="store_true", help="send one message to everybody now, and say who took it"
    )
    parser.add_argument("--check", action="store_true", help="only say whether the file is right")
    parser.add_argument("--once", action="store_true", help="one look and one delivery, then end")
    parser.add_argument("--until-gone", type=int, default=0, metavar="PID", help="end after this process")
    return parser
