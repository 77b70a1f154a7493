"""Talking to a virtual machine: to QEMU (QMP) and, past the network, to the agent inside.

Both speak JSON over a UNIX socket, one caller at a time.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura_lab import host


class NoAnswer(host.LabError):
    """Nobody is at the other end, or it did not answer in time."""


@dataclass
class _Connection:
    """Newline-separated JSON objects over a socket."""

    path: Path
    deadline: float

    def __post_init__(self) -> None:
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(max(0.1, self.deadline - time.monotonic()))
            self._socket.connect(str(self.path))
        except OSError as problem:
            self._socket.close()
            raise NoAnswer(f"{self.path}: {problem}") from problem

    def close(self) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any], before: bytes = b"") -> None:
        try:
            self._socket.sendall(before + json.dumps(message).encode() + b"\n")
        except OSError as problem:
            raise NoAnswer(f"{self.path}: {problem}") from problem

    def receive(self) -> dict[str, Any]:
        """The next object; what is no JSON (the rest of an answer to somebody who has left) is passed over."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                try:
                    return dict(json.loads(line.rpartition(b"\xff")[2]))
                except ValueError:
                    continue
            try:
                self._socket.settimeout(max(0.01, self.deadline - time.monotonic()))
                more = self._socket.recv(1 << 20)
            except OSError as problem:
                raise NoAnswer(f"{self.path}: {problem or 'no answer in time'}") from problem
            if not more:
                raise NoAnswer(f"{self.path}: the connection was closed")
            self._buffer += more


@contextmanager
def _connected(path: Path, limit: float) -> Iterator[_Connection]:
    """The socket for this process alone (QEMU would let a second one wait without a word)."""
    deadline = time.monotonic() + limit
    try:
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise NoAnswer(f"{path}: {problem}") from problem
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoAnswer(f"{path}: in use by somebody else") from None
                time.sleep(0.02)
        connection = _Connection(path, deadline)
        try:
            yield connection
        finally:
            connection.close()
    finally:
        os.close(lock)


def monitor(path: Path, *commands: dict[str, Any], limit: float = 30) -> list[Any]:
    """Give QEMU these commands, one after the other; what each of them returned."""
    with _connected(path, limit) as qemu:
        qemu.receive()  # its greeting
        return [_answer(qemu, command) for command in [{"execute": "qmp_capabilities"}, *commands]][1:]


def human(path: Path, line: str, limit: float) -> None:
    """A command of QEMU's human monitor: savevm and loadvm, of which every version has the same."""
    arguments = {"command-line": line}
    (said,) = monitor(path, {"execute": "human-monitor-command", "arguments": arguments}, limit=limit)
    if said.strip():
        raise host.LabError(f"QEMU does not do `{line}`: {said.strip()}")


def _answer(peer: _Connection, command: dict[str, Any]) -> Any:
    peer.send(command)
    while True:
        message = peer.receive()
        if "error" in message:
            raise host.LabError(f"QEMU does not do {command}: {message['error'].get('desc')}")
        if "return" in message:
            return message["return"]


@dataclass
class Agent:
    """qemu-guest-agent in the machine: needs no network there."""

    path: Path

    def ask(self, command: str, limit: float = 60, **arguments: Any) -> Any:
        """One question. Asked again while nobody answers: the guest may be busy, or just booting."""
        return self._call(command, arguments, limit, _answer)

    def tell(self, command: str, limit: float = 60, **arguments: Any) -> None:
        """An order that has no answer (guest-shutdown)."""
        self._call(command, arguments, limit, _Connection.send)

    def _call(
        self,
        command: str,
        arguments: dict[str, Any],
        limit: float,
        how: Callable[[_Connection, dict[str, Any]], Any],
    ) -> Any:
        deadline = time.monotonic() + limit
        patience = 5.0  # a guest that was still booting may have missed the question; a slow one needs longer
        while True:
            try:
                with _connected(self.path, max(0.1, deadline - time.monotonic())) as guest:
                    self._find(guest, min(patience, deadline - time.monotonic()))
                    guest.deadline = deadline
                    return how(guest, {"execute": command, "arguments": arguments})
            except NoAnswer:
                host.stop_if_interrupted()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                patience *= 1.5

    @staticmethod
    def _find(guest: _Connection, limit: float) -> None:
        """What a caller before us has asked may still be on its way: wait for the answer to our own number."""
        guest.deadline = time.monotonic() + max(0.1, limit)
        number = secrets.randbits(50)
        question = {"execute": "guest-sync-delimited", "arguments": {"id": number}}
        guest.send(question, before=b"\xff")  # \xff: forget what you have half understood
        while guest.receive().get("return") != number:
            pass

    def run(self, words: list[str], limit: float, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """Run a command as root in there; its exit code, stdout and stderr (complete, when it has ended)."""
        deadline = time.monotonic() + limit
        arguments: dict[str, Any] = {"path": words[0], "arg": words[1:], "capture-output": True}
        if stdin:
            arguments["input-data"] = base64.b64encode(stdin).decode()
        pid = self.ask("guest-exec", min(limit, 300), **arguments)["pid"]
        pause = 0.02
        while True:
            state = self.ask("guest-exec-status", max(5.0, deadline - time.monotonic()), pid=pid)
            if state["exited"]:
                break
            if time.monotonic() > deadline:
                raise NoAnswer(f"`{' '.join(words)}` still runs after {limit:.0f} s")
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)
        out, error = (base64.b64decode(state.get(name, "")) for name in ("out-data", "err-data"))
        return state.get("exitcode", 128 + state.get("signal", 0)), out, error
