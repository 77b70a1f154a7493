"""A real S3 server for the tests (rclone serve s3), and a proxy before it that can fail as networks and servers do.

rclone checks signatures, keeps objects as files below a directory, and knows nothing of the libraries that the trainer
uses. It comes as a wheel (requirements/dev.in) and starts in a fifth of a second.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from services import listens, serving, wait_until

KEY, SECRET = "AKIATESTOFAURA", "a-secret-that-nobody-may-see"
RCLONE = Path(sys.executable).with_name("rclone")
HOP = ("connection", "transfer-encoding", "keep-alive")


@dataclass
class Fault:
    """What becomes of the next `times` requests whose line contains `where`: a status, or a connection that is cut in
    the middle of what it carries."""

    where: str
    times: int
    status: int = 0

    def applies(self, line: str) -> bool:
        if self.times > 0 and self.where in line:
            self.times -= 1
            return True
        return False


@dataclass
class Storage:
    """`files`: where the server keeps bucket/key. `asked`: every request that came, such as 'PUT /bucket/key?…'."""

    files: Path
    server_port: int
    port: int = 0
    asked: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a person would have set; nothing of this machine's own."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def fail(self, where: str, status: int, times: int = 1000) -> None:
        self.faults.append(Fault(where, times, status))

    def cut(self, where: str, times: int = 1) -> None:
        self.faults.append(Fault(where, times))

    def mend(self) -> None:
        self.faults.clear()
        self.asked.clear()

    def settle(self) -> None:
        """After a file was changed behind the server's back."""
        time.sleep(0.05)

    def of(self, method: str) -> list[str]:
        """The keys behind the bucket's name that were asked for with this method, in their order."""
        lines = [line.split() for line in self.asked]
        return [path.split("?")[0] for verb, path in lines if verb == method]


@contextmanager
def storage(files: Path) -> Iterator[Storage]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [RCLONE, "serve", "s3", "--config", os.devnull, "--addr", f"127.0.0.1:{port}"]
    # The tests change its files behind its back: it shall not remember them for long (with 0 it spins).
    command += ["--auth-key", f"{KEY},{SECRET}", "--dir-cache-time", "10ms", str(files)]
    log = files.parent / "rclone.log"
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        wait_until(lambda: listens(port) or process.poll() is not None, 60, log.read_text)
        with _proxy(Storage(files, port)) as there:
            yield there
    finally:
        process.kill()  # asked to end, it would wait ten seconds for connections that are kept
        process.wait()


@contextmanager
def _proxy(there: Storage) -> Iterator[Storage]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            line = f"{self.command} {self.path}"
            there.asked.append(line)
            fault = next((one for one in there.faults if one.applies(line)), None)
            length = int(self.headers.get("Content-Length", 0))
            if fault and not fault.status and length:  # in the middle of what comes
                self.rfile.read(length // 2)
                return self.cut()
            body = self.rfile.read(length)
            if fault and fault.status:
                code = b"AccessDenied" if fault.status == 403 else b"InternalError"
                return self.answer(fault.status, {}, b"<Error><Code>%s</Code></Error>" % code)
            status, headers, content = self.ask(body)
            if fault:  # in the middle of what goes
                self.answer(status, headers, content, content[: len(content) // 2])
                return self.cut()
            return self.answer(status, headers, content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

        def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            server = http.client.HTTPConnection("127.0.0.1", there.server_port, timeout=60)
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP}
            content = answer.read()
            server.close()
            return answer.status, headers, content

        def answer(
            self, status: int, headers: dict[str, str], content: bytes, sent: bytes | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content if sent is None else sent)

        def cut(self) -> None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # the other side has gone
                self.close_connection = True

    with serving(Handler) as there.port:
        yield there
