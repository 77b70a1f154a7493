"""What a person sees of a playbook: where it is, what it changed, what it has to say, and what to type next."""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.plugins.callback.default import CallbackModule as Default
from ansible.utils.display import Display

DOCUMENTATION = """
name: aura
author: Aura
type: stdout
short_description: A moving line, what changed, and sentences
description:
  - On a terminal one line moves (how long, how many nodes, the task, and what this machine has received and sent
    meanwhile, where that is much). Above it stays what matters, a line each, what changed and on which nodes; messages
    as they are; and a failure as its sentence, once.
  - Without a terminal the same without the moving line and without control characters.
  - With C(-v), and with the callback C(default), everything that Ansible says.
  - What a playbook sets as C(next) (M(ansible.builtin.set_stats)) comes last, the command to type next, say.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
"""

ASKS = ("ask", "pause", "ansible.builtin.pause")
# What M(assert) says where nothing else was wanted.
EMPTY = ("", "All assertions passed")
MUCH = 20_000_000  # bytes
NET = Path("/sys/class/net")
Hosts = dict[str, list[str]]  # the nodes that say the same, by what they say


class CallbackModule(Default):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "aura"

    def __init__(self) -> None:
        super().__init__()
        self.began = time.monotonic()
        self.line = MovingLine()
        self.task = self.heading = ""
        self.hosts = self.done = 0
        self.changed: list[str] = []
        self.failed: Hosts = {}
        self.said: Hosts = {}

    # ── where it is ──────────────────────────────────────────────────────────────────────────────

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._flush()
        self.hosts = 0
        self.heading = play.get_name()  # of a play that nobody is in nothing is said

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self._flush()
        if self.heading:
            self._say(self.heading, constants.COLOR_HIGHLIGHT)
            self.heading = ""
        self.task, self.done = task.get_name().rpartition(" : ")[2].strip(), 0
        self.line.begin(task.action in ASKS)
        self._move()

    def _no_news(self, *_: Any) -> None:
        """Of a loop its end says it, and a group that nobody is in is none."""

    v2_playbook_on_include = v2_playbook_on_no_hosts_matched = v2_runner_retry = _no_news
    v2_runner_item_on_ok = v2_runner_item_on_skipped = v2_runner_item_on_failed = _no_news

    # ── what it says ─────────────────────────────────────────────────────────────────────────────

    def v2_runner_on_ok(self, result: Any) -> None:
        self._ended(result)
        said, host = result.result, result.host.get_name()
        if said.get("changed"):
            self.changed.append(host)
        message = (
            text(said.get("msg", "")) if result.task.action.rpartition(".")[2] in ("debug", "assert") else ""
        )
        if message not in EMPTY:
            self.said.setdefault(message, []).extend([] if result.task.run_once else [host])
        self._move()

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._ended(result)
        self._move()

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._ended(result)
        if not ignore_errors:
            for sentence in sentences(result.result):
                self.failed.setdefault(sentence, []).append(result.host.get_name())

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._ended(result)
        if not result.task.ignore_unreachable:
            self.failed.setdefault(text(result.result.get("msg", "")), []).append(result.host.get_name())

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._flush()
        self.line.begin(True)
        seconds = f"{time.monotonic() - self.began:.0f} s"
        counts: Hosts = {}
        for host in sorted(stats.processed):
            counts.setdefault(counted(stats.summarize(host)), []).append(host)
        for count, hosts in counts.items():
            self._say(f"{', '.join(hosts)}: {count}, {seconds}", constants.COLOR_DEBUG)
        following = stats.custom.get("_run", {}).get("next", "")
        if following:
            self._say(text(following), constants.COLOR_OK)

    # ── how it says it ───────────────────────────────────────────────────────────────────────────

    def _ended(self, result: Any) -> None:
        self.done += 1
        self.hosts = max(self.hosts, self.done)  # how many take part shows in the first task
        self._handle_warnings(result.result)

    def _flush(self) -> None:
        """What the task before has to say, of all nodes together."""
        if self.changed:
            self._say(f"  {self._who(self.changed)}{self.task}", constants.COLOR_CHANGED)
        for message, hosts in self.said.items():
            who = "" if len(hosts) == self.done or named(message, hosts) else self._who(hosts)
            self._say("  " + (who + message).replace("\n", "\n  "))
        for sentence, hosts in self.failed.items():
            who = "" if named(sentence, hosts) else self._who(hosts)
            self._say(
                f"✗ {who}{sentence or f'«{self.task}» failed; with -v it says more'}", constants.COLOR_ERROR
            )
        self.changed, self.said, self.failed = [], {}, {}

    def _who(self, hosts: list[str]) -> str:
        if len(hosts) == self.done > 2:
            return f"all {self.done} nodes: "
        return f"{', '.join(sorted(hosts))}: " if hosts else ""

    def _say(self, message: str, colour: str | None = None) -> None:
        with self.line.aside():
            self._display.display(plain(as_typed(message)), color=colour)

    def _move(self) -> None:
        self.line.show(f"{self.done}/{self.hosts}  {self.task}" if self.hosts > 1 else self.task)


class MovingLine:
    """The last line of a terminal, written again every second; nothing at all elsewhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.there = sys.stdout.isatty()
        self.began = time.monotonic()
        self.text = ""
        self.moved = moved()
        self.paused = True
        if self.there:
            threading.Thread(target=self._go_on, daemon=True).start()

    def show(self, message: str) -> None:
        self.text = message
        with self.lock:
            self._write()

    def begin(self, paused: bool) -> None:
        """A task begins. While somebody is asked something nothing moves, nor at the end."""
        with self.lock:
            self._erase()
            self.paused, self.moved = paused, moved()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is said goes above the moving line."""
        with self.lock:
            self._erase()
            yield
            sys.stdout.flush()
            self._write()

    def _go_on(self) -> None:
        while True:
            time.sleep(1)
            with self.lock:
                self._write()

    def _erase(self) -> None:
        if self.there and not self.paused:
            os.write(1, b"\r\033[K")

    def _write(self) -> None:
        if not self.there or self.paused or not self.text:
            return
        width = os.get_terminal_size(1).columns or 80
        seconds, traffic = time.monotonic() - self.began, so_far(self.moved, moved())
        line = f"{seconds:5.0f} s  {self.text}{traffic}"[: width - 1]
        os.write(1, f"\r\033[K{line}".encode())


def moved() -> tuple[int, int]:
    """Bytes that this machine's network cards have received and sent; bridges and the lab's cables do not count."""
    received = sent = 0
    for device in NET.glob("*/device"):
        with suppress(OSError):  # it has just been pulled out
            received += int((device.parent / "statistics/rx_bytes").read_text())
            sent += int((device.parent / "statistics/tx_bytes").read_text())
    return received, sent


def so_far(then: tuple[int, int], now: tuple[int, int]) -> str:
    """What has come and gone since then: of gigabytes that somebody waits for, how many are there."""
    amounts = [("↓", now[0] - then[0]), ("↑", now[1] - then[1])]
    return "".join(f"  {way} {amount / 1e6:,.0f} MB" for way, amount in amounts if amount >= MUCH)


def text(said: Any) -> str:
    return "\n".join(map(str, said)) if isinstance(said, list) else str(said).rstrip()


def plain(message: str) -> str:
    """What a node says moves no cursor and writes into no clipboard."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", message)


def as_typed(message: str) -> str:
    """What it says is to be typed is about the inventory that this command was given, where it was given one."""
    given = tuple(context.CLIARGS.get("inventory") or ())
    if given == tuple(constants.DEFAULT_HOST_LIST):
        return message
    words = "ansible-playbook " + "".join(f"-i {shlex.quote(_from_here(place))} " for place in given)
    return re.sub(r"\bansible-playbook (?=(playbooks/)?\w+\.yml)", lambda _: words, message)


def _from_here(place: str) -> str:
    return os.path.relpath(place, os.environ.get("PWD") or ".") if place.startswith("/") else place


def named(message: str, hosts: list[str]) -> bool:
    """Whether the message says itself which node it is about."""
    return len(hosts) == 1 and hosts[0] in message


def sentences(said: dict[str, Any]) -> list[str]:
    """Why it failed: of a loop, each item's; what a program wrote where it says nothing better."""
    found = []
    for one in [one for one in said.get("results", []) if one.get("failed")] or [said]:
        message = text(one.get("msg", ""))
        if message in ("", "non-zero return code", "MODULE FAILURE"):
            wrote = one.get("stderr") or one.get("module_stderr") or one.get("stdout") or ""
            message = "\n".join(str(wrote).strip().splitlines()[-8:]) or message
        found.append(message.removeprefix("Task failed: ").removeprefix("Action failed: "))
    return list(dict.fromkeys(found))


def counted(summary: dict[str, int]) -> str:
    if summary["unreachable"]:
        return "not reached"
    words = ["failed"] if summary["failures"] else []
    return ", ".join([*words, f"{summary['changed']} changed" if summary["changed"] else "nothing changed"])


if Display().verbosity:  # who says -v wants all of it
    CallbackModule = Default
