"""Lines of JSON over a socket, and what every part of the probe must know."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aura.check.probe import limits
from aura.errors import in_words

SCHEMA = 1
Json = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    node: str
    peers: dict[str, str]  # name -> LAN address, this node included; the first one is the coordinator
    rendezvous_port: int
    ephemeral_port: int
    patience: float = 12.0  # seconds a peer may take to answer
    expected_mbit: float = 1000.0  # link speed; what is well below is measured a second time
    now: Callable[[], float] = time.time  # the clock that is compared

    @property
    def address(self) -> str:
        return self.peers[self.node]

    @property
    def coordinator(self) -> str:
        return next(iter(self.peers))

    @property
    def others(self) -> list[str]:
        return [name for name in self.peers if name != self.node]

    @property
    def ports(self) -> dict[str, int]:
        return {"rendezvous": self.rendezvous_port, "ephemeral": self.ephemeral_port}


class Refusal(Exception):
    """A peer could not be reached, or the wrong one answered. `kind` is one of: refused, timeout, unreachable,
    no address (this node lacks its LAN address), wrong node, silent, error."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


class Line:
    """A socket that speaks lines of JSON. `receive` raises OSError on a timeout, an end or anything not JSON."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""

    def send(self, message: Json) -> None:
        self.socket.settimeout(limits.CONNECT_TIMEOUT)
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> Json:
        end = time.monotonic() + timeout
        while b"\n" not in self._unread:
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            received = self.socket.recv(4096)
            if not received:
                raise ConnectionError(in_words("probe_closed"))
            self._unread += received
            if len(self._unread) > 65536:
                raise OSError(in_words("probe_no_line"))
        line, self._unread = self._unread.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError as error:
            raise OSError(in_words("probe_no_json")) from error
        if not isinstance(message, dict):
            raise OSError(in_words("probe_no_object"))
        return message

    def close(self) -> None:
        self.socket.close()
