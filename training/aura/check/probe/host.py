"""The side that listens: greets, answers clock exchanges, counts the bytes of a measurement."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from aura.check.probe import limits
from aura.check.probe.node import find_port_holder
from aura.check.probe.wire import SCHEMA, Json, Line, Settings


@dataclass
class Host:
    """Listens on both ports, greets, and serves clock exchanges and bandwidth measurements."""

    settings: Settings
    busy: dict[str, Json] = field(default_factory=dict)  # port name -> why it could not be listened on
    heard: set[str] = field(default_factory=set)  # peers that connected to this node
    controls: dict[str, Line] = field(default_factory=dict)  # the coordinator's connections to the others
    _sockets: list[socket.socket] = field(default_factory=list)

    def open(self) -> None:
        for name, port in self.settings.ports.items():
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.settings.address, port))
                listener.listen(64)
            except OSError as error:
                listener.close()
                if error.errno == errno.EADDRINUSE:
                    self.busy[name] = {"reason": "in use", "holder": find_port_holder(port)}
                elif error.errno == errno.EADDRNOTAVAIL:
                    self.busy[name] = {"reason": "no address", "holder": None}
                else:
                    self.busy[name] = {"reason": error.strerror or str(error), "holder": None}
                continue
            self._sockets.append(listener)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        for listener in self._sockets:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
            listener.close()
        for line in self.controls.values():
            line.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection)
        keep = False
        try:
            line.send({"aura_probe": SCHEMA, "node": self.settings.node})
            wish = line.receive(limits.CONNECT_TIMEOUT)
            caller = wish.get("node")
            if caller not in self.settings.peers:
                return
            self.heard.add(caller)
            if wish.get("want") == "clock":
                self._serve_clock(line)
            elif wish.get("want") == "bandwidth":
                line.send(count_bytes(connection))
            elif wish.get("want") == "control":
                keep = True
                self.controls[caller] = line
        except OSError:
            pass  # the caller went away or is no probe; the other side reports it
        finally:
            if not keep:
                line.close()

    def _serve_clock(self, line: Line) -> None:
        while line.receive(limits.CONNECT_TIMEOUT).get("want") == "time":
            received = self.settings.now()
            line.send({"received": received, "sent": self.settings.now()})


def count_bytes(connection: socket.socket) -> Json:
    """Reads until the sender ends; returns {"bytes", "seconds"} of the part after the warm-up."""
    buffer = bytearray(limits.CHUNK)
    connection.settimeout(limits.CONNECT_TIMEOUT)
    started = warm = last = 0.0
    total = counted_from = 0
    while True:
        size = connection.recv_into(buffer)
        now = time.monotonic()
        if size == 0:
            break
        if not started:
            started = warm = now
        total += size
        if warm == started and now - started >= limits.WARM_UP:
            warm, counted_from = now, total
        last = now
        if last - started > limits.SLOT_LIMIT:
            break
    return {"bytes": total - counted_from, "seconds": last - warm}


@contextmanager
def listening(settings: Settings) -> Iterator[Host]:
    host = Host(settings)
    host.open()
    try:
        yield host
    finally:
        host.close()
