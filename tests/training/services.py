"""Servers that take messages on loopback, as the services' do: they can refuse, be cut, and tell what came."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Received:
    """`answer`: the status that is given next, or None for a connection that is cut in the middle. `refuses`: the words
    in a message that is answered with 400, whatever the others are."""

    port: int = 0
    answer: int | None = 200
    refuses: str = ""
    slow: float = 0.0  # seconds before an answer
    paths: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    asked: int = 0  # refused ones too

    def wait_for(self, count: int, seconds: float = 60) -> None:
        wait_until(lambda: len(self.bodies) >= count, seconds, lambda: f"{len(self.bodies)} of {count}")

    @property
    def events(self) -> list[str]:
        return [body["event"] for body in self.bodies]


def wait_until(is_true: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def listens(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def asked(address: str, path: str, **what: Any) -> Any:
    """What a server answers in JSON; address: HOST:PORT."""
    there = http.client.HTTPConnection(address, timeout=60)
    there.request("POST", path, json.dumps(what), {"Content-Type": "application/json"})
    answer = json.loads(there.getresponse().read())
    there.close()
    return answer


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def web_server() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.asked += 1
            time.sleep(received.slow)
            if received.answer is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            answer = 400 if received.refuses and received.refuses in body.decode() else received.answer
            if answer < 300:
                received.paths.append(self.path)
                received.bodies.append(json.loads(body))
            self.send_response(answer)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok" if "slack" in self.path or "T1JJ" in self.path else b"{}")

        def do_GET(self) -> None:
            received.asked += 1
            received.paths.append(self.path)
            self.send_response(received.answer or 500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as received.port:
        yield received


@contextmanager
def mail_server() -> Iterator[Received]:
    """SMTP, as far as one message needs it (RFC 5321)."""
    received = Received()
    listener = socket.create_server(("127.0.0.1", 0))
    received.port = listener.getsockname()[1]

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b"220 test\r\n")
            for line in lines:
                verb = line.split(b" ")[0].strip().upper()
                if verb == b"DATA":
                    connection.sendall(b"354 go on\r\n")
                    received.bodies.append(b"".join(iter(lines.readline, b".\r\n")).decode())
                connection.sendall(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
                if verb == b"QUIT":
                    return

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield received
