"""What this node sees of itself and of its peers, as one JSON document on standard output.

`playbooks/connectivity.yml` runs it on every node at the same moment; `aura/connectivity.py` judges the documents.

Phase 1 needs no order: every node listens on two ports of its LAN address, greets whoever connects with its own
name, and connects to both ports of every peer, again and again until an answer or until its patience ends (the
nodes do not start at the same moment). Phase 2 is conducted by the first node, the coordinator, over one control
connection per node: in each round disjoint pairs measure the bandwidth, one direction after the other.

Every wait is bounded: a node that is missing, or that dies in the middle, costs time but hangs nobody.
Standard library only, Python 3.10 or later: it also runs where the trainer is not installed yet.

Exit codes: 0 the document was printed (whatever it says), 64 wrong usage.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
Json = dict[str, Any]

RELEASE_LINK = Path("/opt/aura/current")
STATE_DIRECTORY = Path("/var/lib/aura")
PACKAGES = ("aura", "torch", "numpy", "tokenizers", "safetensors", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

CONNECT_TIMEOUT = 2.0  # seconds for one attempt to connect, and for one answer
RETRY_PAUSE = 0.25  # seconds between two attempts
STRAGGLER_GRACE = 4.0  # seconds the coordinator waits for a node beyond its own patience
SILENCE_LIMIT = 8.0  # seconds without a word from the coordinator, who says something every few
SLOT_LIMIT = 5.0  # seconds for one measurement, all included
BANDWIDTH_BUDGET = 20.0  # seconds for all measurements together
WARM_UP = 0.1  # seconds at the start of a measurement that do not count (TCP slow start, a shaper's burst)
CHUNK = 256 * 1024  # bytes
SEND_BUFFER = 1024 * 1024  # bytes; small, so that little is on its way when a measurement ends


@dataclass(frozen=True)
class Settings:
    node: str
    peers: dict[str, str]  # name -> LAN address, this node included; the first one is the coordinator
    rendezvous_port: int
    ephemeral_port: int
    patience: float = 12.0  # seconds a peer may take to answer
    measure_seconds: float = 0.4  # per ordered pair
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


# --- Lines of JSON over a socket ---


class Line:
    """A socket that speaks lines of JSON. `receive` raises OSError on a timeout, an end or anything not JSON."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""

    def send(self, message: Json) -> None:
        self.socket.settimeout(CONNECT_TIMEOUT)
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> Json:
        end = time.monotonic() + timeout
        while b"\n" not in self._unread:
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            received = self.socket.recv(4096)
            if not received:
                raise ConnectionError("the connection was closed")
            self._unread += received
            if len(self._unread) > 65536:
                raise OSError("the answer is not a line of text")
        line, self._unread = self._unread.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError as error:
            raise OSError("the answer is not JSON") from error
        if not isinstance(message, dict):
            raise OSError("the answer is not a JSON object")
        return message

    def close(self) -> None:
        self.socket.close()


# --- The side that listens ---


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
            wish = line.receive(CONNECT_TIMEOUT)
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
        while line.receive(CONNECT_TIMEOUT).get("want") == "time":
            received = self.settings.now()
            line.send({"received": received, "sent": self.settings.now()})


def count_bytes(connection: socket.socket) -> Json:
    """Reads until the sender ends; returns {"bytes", "seconds"} of the part after the warm-up."""
    buffer = bytearray(CHUNK)
    connection.settimeout(CONNECT_TIMEOUT)
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
        if warm == started and now - started >= WARM_UP:
            warm, counted_from = now, total
        last = now
        if last - started > SLOT_LIMIT:
            break
    return {"bytes": total - counted_from, "seconds": last - warm}


# --- The side that connects ---


def connect(settings: Settings, peer: str, port: int, want: str) -> Line:
    """Connects from this node's LAN address, checks who answers, and says what it wants. Raises Refusal."""
    address = settings.peers[peer]
    try:
        # With port 0 as source the kernel picks one.
        connection = socket.create_connection((address, port), CONNECT_TIMEOUT, (settings.address, 0))
    except OSError as error:
        raise refusal(error) from error
    line = Line(connection)
    try:
        greeting = line.receive(CONNECT_TIMEOUT)
        if "aura_probe" not in greeting:
            raise OSError("the answer is no greeting")
        if greeting.get("node") == peer:
            line.send({"node": settings.node, "want": want})
            return line
    except TimeoutError as error:
        line.close()
        raise Refusal("silent", "connected, but nothing was said") from error
    except ConnectionError as error:
        line.close()
        raise Refusal("closed", "connected, but the connection was closed at once") from error
    except OSError as error:
        line.close()
        raise Refusal("silent", f"connected, but {error}") from error
    line.close()
    raise Refusal("wrong node", str(greeting.get("node")))


def refusal(error: OSError) -> Refusal:
    """The error of a connect(), in our words."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Refusal("timeout", "no answer")
    if error.errno == errno.ECONNREFUSED:
        return Refusal("refused", "refused")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return Refusal("unreachable", error.strerror or "unreachable")
    if error.errno == errno.EADDRNOTAVAIL:
        return Refusal("no address", "this node does not have its LAN address")
    return Refusal("error", error.strerror or str(error))


def try_port(settings: Settings, peer: str, port: int, deadline: float) -> Json:
    """Tries until the peer greets or the deadline (monotonic) has passed. Two kinds of answer are final at once:
    the wrong node, and a program that accepts but says nothing (twice)."""
    silences = 0
    while True:
        began = time.monotonic()
        try:
            connect(settings, peer, port, "hello").close()
            return {"ok": True, "milliseconds": round((time.monotonic() - began) * 1000, 2)}
        except Refusal as problem:
            silences += problem.kind == "silent"
            final = problem.kind in ("wrong node", "no address") or silences > 1
            if final or time.monotonic() + RETRY_PAUSE >= deadline:
                return {"ok": False, "error": problem.kind, "detail": str(problem)}
        time.sleep(RETRY_PAUSE)


def try_all(settings: Settings) -> dict[str, Json]:
    """{peer: {"rendezvous": {...}, "ephemeral": {...}}} for every other node, all tried at the same time."""
    deadline = time.monotonic() + settings.patience
    found: dict[str, Json] = {peer: {} for peer in settings.others}

    def attempt(peer: str, name: str, port: int) -> None:
        found[peer][name] = try_port(settings, peer, port, deadline)

    threads = [
        threading.Thread(target=attempt, args=(peer, name, port), daemon=True)
        for peer in settings.others
        for name, port in settings.ports.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + 3 * CONNECT_TIMEOUT - time.monotonic()))
    missing: Json = {"ok": False, "error": "error", "detail": "the attempt did not end"}
    return {
        peer: {name: tried.get(name, missing) for name in settings.ports} for peer, tried in found.items()
    }


def open_port(settings: Settings, reach: Json) -> int | None:
    """A port on which this peer answered, the ephemeral one first."""
    return next((settings.ports[name] for name in ("ephemeral", "rendezvous") if reach[name]["ok"]), None)


def measure_clock(settings: Settings, port: int, exchanges: int = 16) -> Json:
    """This node's clock minus the coordinator's, in seconds, from the exchange with the shortest round trip.

    As in NTP (RFC 5905, section 8): with t0 sent, t1 received there, t2 answered there, t3 back here, the peer is
    ((t1 - t0) + (t2 - t3)) / 2 ahead; the error is at most half of the round trip (t3 - t0) - (t2 - t1).
    """
    reference = settings.coordinator
    best: tuple[float, float] | None = None
    try:
        line = connect(settings, reference, port, "clock")
        try:
            for _ in range(exchanges):
                sent, mono = settings.now(), time.monotonic()
                line.send({"want": "time"})
                answer = line.receive(CONNECT_TIMEOUT)
                back = sent + (time.monotonic() - mono)
                trip = (back - sent) - (answer["sent"] - answer["received"])
                ahead = ((answer["received"] - sent) + (answer["sent"] - back)) / 2
                best = min(best, (trip, -ahead)) if best else (trip, -ahead)
        finally:
            line.close()
    except (Refusal, OSError, KeyError, TypeError) as problem:
        if best is None:
            return {"ok": False, "reference": reference, "error": str(problem)}
    assert best is not None
    return {"ok": True, "reference": reference, "offset_seconds": best[1], "round_trip_seconds": best[0]}


def send_bytes(settings: Settings, peer: str, port: int) -> Json:
    """Sends to the peer for `measure_seconds`; the rate is what the peer counted. Never raises."""
    try:
        line = connect(settings, peer, port, "bandwidth")
        try:
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            line.socket.settimeout(CONNECT_TIMEOUT)
            payload = bytes(CHUNK)
            end = time.monotonic() + settings.measure_seconds
            while time.monotonic() < end:
                line.socket.sendall(payload)
            line.socket.shutdown(socket.SHUT_WR)
            counted = line.receive(CONNECT_TIMEOUT)
        finally:
            line.close()
        if counted["seconds"] <= 0:
            return {"ok": False, "error": "too little arrived to measure"}
        return {"ok": True, "mbit_per_second": round(counted["bytes"] * 8 / counted["seconds"] / 1e6, 1)}
    except TimeoutError:
        return {"ok": False, "error": "stalled: nothing arrived for 2 s"}
    except (Refusal, OSError, KeyError, TypeError) as problem:
        return {"ok": False, "error": str(problem)}


# --- Phase 2: who measures when ---


def rounds(nodes: list[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds of disjoint pairs (circle method): n rounds for odd n, n - 1 for even n.

    >>> rounds(["a", "b", "c", "d"])
    [[('a', 'd'), ('b', 'c')], [('a', 'c'), ('d', 'b')], [('a', 'b'), ('c', 'd')]]
    """
    circle: list[str | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


@dataclass
class Coordinator:
    """Conducts the measurements from the first node; holds a control connection to each of the others."""

    settings: Settings
    controls: dict[str, Line]
    local: Callable[[str], Json]  # measures from this node to the named one
    lost: dict[str, str] = field(default_factory=dict)  # node -> what happened

    def gather(self, deadline: float) -> None:
        """Waits until every node has come, or until the deadline; those that came are told to wait."""
        while time.monotonic() < deadline and not all(n in self.controls for n in self.settings.others):
            for name in [*self.controls]:
                self._tell(name, {"do": "wait"})
            time.sleep(0.1)
        for name in self.settings.others:
            if name not in self.controls:
                self.lost[name] = "did not come to the measurement"

    def present(self) -> list[str]:
        here = [name for name in self.settings.others if name in self.controls and name not in self.lost]
        return [self.settings.node, *here]

    def conduct(self) -> None:
        """Measures all ordered pairs, then once more, alone, those well below the link's speed."""
        deadline = time.monotonic() + BANDWIDTH_BUDGET
        slow: list[tuple[str, str]] = []
        for pairs in rounds(self.present()):
            for slot in (pairs, [(b, a) for a, b in pairs]):
                slow += self._measure(slot, deadline)
        for pair in slow:
            self._measure([pair], deadline)
        for name in self.present()[1:]:
            self._tell(name, {"do": "end"})

    def _measure(self, slot: list[tuple[str, str]], deadline: float) -> list[tuple[str, str]]:
        """One slot of disjoint (sender, receiver); returns the pairs that were slow."""
        here = self.present()
        slot = [(sender, receiver) for sender, receiver in slot if sender in here and receiver in here]
        if not slot or time.monotonic() > deadline:
            return []
        end = time.monotonic() + SLOT_LIMIT
        orders: dict[str, Json] = {name: {"do": "wait"} for name in here}
        orders.update({sender: {"do": "send", "to": receiver} for sender, receiver in slot})
        for name in here[1:]:
            self._tell(name, orders[name])
        slow = []
        for sender, receiver in sorted(slot, key=lambda pair: pair[0] != self.settings.node):  # own one first
            if sender == self.settings.node:
                result = self.local(receiver)
            elif sender in self.lost:
                continue
            else:
                try:
                    result = self.controls[sender].receive(max(0.1, end - time.monotonic()))
                except OSError as error:
                    self._lose(sender, error)
                    continue
            if result.get("ok") and result["mbit_per_second"] < 0.8 * self.settings.expected_mbit:
                slow.append((sender, receiver))
        return slow

    def _tell(self, name: str, message: Json) -> None:
        if name in self.lost:
            return
        try:
            self.controls[name].send(message)
        except OSError as error:
            self._lose(name, error)

    def _lose(self, name: str, error: OSError) -> None:
        self.lost[name] = f"left during the measurement ({error})"


def obey(control: Line, measure: Callable[[str], Json], first_wait: float) -> str | None:
    """Does what the coordinator says until it says "end". Returns None, or why it ended early. The first word may
    take longer (seconds): the coordinator speaks only when it has tried to reach everybody itself."""
    limit = first_wait
    while True:
        try:
            order = control.receive(limit)
            limit = SILENCE_LIMIT
            if order.get("do") == "end":
                return None
            if order.get("do") == "send":
                control.send(measure(str(order.get("to"))))
        except OSError as error:
            return f"the coordinator went away in the middle ({error})"


# --- This node ---


def describe_node(settings: Settings) -> Json:
    """Names, addresses, interface, link, release, versions, disk: all of this node, read only."""
    routes = {peer: find_route(settings.peers[peer]) for peer in settings.others}
    addresses = find_addresses()
    interface = next((name for name, found in addresses.items() if settings.address in found), None)
    return {
        "hostname": socket.gethostname(),
        "addresses": addresses,
        "interface": interface,
        "link": describe_link(interface) if interface else None,
        "routes": routes,
        "resolves": resolve([*dict.fromkeys([socket.gethostname(), *settings.peers])]),
        "release": find_release(),
        "versions": find_versions(),
        "disk": describe_disk(),
    }


def ask_ip(*words: str) -> list[Json]:
    """The answer of iproute2's `ip -json`, or [] where there is none."""
    program = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        return []
    try:
        command = [program, "-json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        answer = json.loads(done.stdout or "[]")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return [entry for entry in answer if isinstance(entry, dict) and entry]


def find_addresses() -> dict[str, list[str]]:
    """{interface: [IPv4 addresses]}"""
    found = {}
    for entry in ask_ip("-4", "address", "show"):
        locals_ = [info["local"] for info in entry.get("addr_info", []) if "local" in info]
        if locals_ and "ifname" in entry:
            found[entry["ifname"]] = locals_
    return found


def find_route(address: str) -> Json:
    """The interface and source address the kernel takes towards an address."""
    answer = ask_ip("route", "get", address)
    route = answer[0] if answer else {}
    return {"interface": route.get("dev"), "source": route.get("prefsrc"), "via": route.get("gateway")}


def describe_link(interface: str) -> Json:
    """Speed (Mbit/s) and duplex as the driver tells them, None where it does not (a virtual interface, say)."""
    directory = Path("/sys/class/net") / interface
    speed: int | None = None
    duplex: str | None = None
    try:
        speed = int((directory / "speed").read_text())
        duplex = (directory / "duplex").read_text().strip()
    except (OSError, ValueError):
        pass
    return {
        "speed_mbit": speed if speed and speed > 0 else None,
        "duplex": duplex,
        "physical": (directory / "device").exists(),
    }


def resolve(names: list[str], limit: float = 5.0) -> dict[str, list[str] | None]:
    """{name: [IPv4 addresses]} as this node resolves them; None where the answer took longer than the limit."""
    found: dict[str, list[str] | None] = {name: None for name in names}

    def look_up(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            found[name] = sorted({str(answer[4][0]) for answer in answers})
        except OSError:
            found[name] = []

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    end = time.monotonic() + limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def find_release() -> str | None:
    try:
        return RELEASE_LINK.readlink().name
    except OSError:
        return None


def find_versions() -> dict[str, str]:
    """Versions of what trains, from the installed metadata: importing torch would take seconds."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_disk() -> Json:
    path = STATE_DIRECTORY if STATE_DIRECTORY.exists() else Path("/")
    usage = shutil.disk_usage(path)
    return {"path": str(path), "free_bytes": usage.free, "total_bytes": usage.total}


def find_port_holder(port: int) -> Json | None:
    """Who listens on a TCP port, as far as /proc tells this user: {"pid", "command", "unit", "user"}.

    A process of another user shows only the user: its open files may not be read.
    """
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and int(words[1].rsplit(":", 1)[1], 16) == port:  # 0A is LISTEN
                inodes[f"socket:[{words[9]}]"] = int(words[7])
    if not inodes:
        return None
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            inode = str(descriptor.readlink())
        except OSError:
            continue
        if inode in inodes:
            process = descriptor.parent.parent
            return {
                "pid": int(process.name),
                "command": _read(process / "comm"),
                "unit": _find_unit(_read(process / "cgroup") or ""),
                "user": _user_name(inodes[inode]),
            }
    return {"pid": None, "command": None, "unit": None, "user": _user_name(next(iter(inodes.values())))}


def _find_unit(cgroup: str) -> str | None:
    """The systemd service in the text of /proc/PID/cgroup."""
    units = re.findall(r"([^/\n]+\.service)", cgroup)
    return units[-1] if units else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# --- All together ---


def run(settings: Settings, document: Json) -> None:
    """Fills the document, section by section, so that what is known can be printed at any moment."""
    document.update(schema=SCHEMA, node=settings.node, address=settings.address, complete=False)
    document.update(coordinator=settings.coordinator, ports=settings.ports, peers=dict(settings.peers))
    started = time.monotonic()
    with listening(settings) as host:
        document["busy_ports"] = host.busy
        about: Json = {}
        describing = threading.Thread(target=lambda: about.update(describe_node(settings)), daemon=True)
        describing.start()
        tcp = try_all(settings)
        document["tcp"] = tcp
        describing.join(10)
        document["about"] = dict(about)
        document["all_peers_answer"] = not host.busy and all(
            reach["ok"] for reaches in tcp.values() for reach in reaches.values()
        )
        deadline = started + settings.patience + STRAGGLER_GRACE
        rates: dict[str, Json] = {}

        def measure(peer: str) -> Json:
            port = open_port(settings, tcp[peer]) if peer in tcp else None
            found = send_bytes(settings, peer, port) if port else {"ok": False, "error": "does not answer"}
            # The better one, where it is the second time: noise only ever makes it slower.
            rates[peer] = max(rates.get(peer, found), found, key=lambda one: one.get("mbit_per_second", 0.0))
            return found

        if settings.node == settings.coordinator:
            coordinator = Coordinator(settings, host.controls, measure)
            coordinator.gather(deadline)
            coordinator.conduct()
            document["lost"] = coordinator.lost
        else:
            document["lost"] = {}
            document["clock"], complaint = follow(settings, tcp, measure, deadline)
            if complaint:
                document["left_out"] = complaint
        document["bandwidth"] = rates
    document["seconds"] = round(time.monotonic() - started, 2)
    document["complete"] = True


def follow(
    settings: Settings, tcp: Json, measure: Callable[[str], Json], deadline: float
) -> tuple[Json, str | None]:
    """The part of every node but the coordinator: compare the clocks, then do as told. Returns the clock section
    and, where this node did not take part to the end, the reason."""
    port = open_port(settings, tcp[settings.coordinator])
    if port is None:
        # Others may still be trying to reach this node: stay until they have given up.
        time.sleep(max(0.0, deadline - time.monotonic()))
        reason = f"{settings.coordinator} does not answer"
        return {"ok": False, "reference": settings.coordinator, "error": reason}, reason
    clock = measure_clock(settings, port)
    try:
        control = connect(settings, settings.coordinator, port, "control")
    except Refusal as problem:
        return clock, f"{settings.coordinator} no longer answers ({problem})"
    try:
        return clock, obey(control, measure, settings.patience + STRAGGLER_GRACE)
    finally:
        control.close()


@contextmanager
def listening(settings: Settings) -> Iterator[Host]:
    host = Host(settings)
    host.open()
    try:
        yield host
    finally:
        host.close()


def parse(argv: list[str] | None) -> tuple[Settings, float]:
    parser = argparse.ArgumentParser(
        prog="aura probe", description="What this node sees of its peers, as JSON."
    )
    option = parser.add_argument
    option("--node", required=True, help="this node's name in the inventory")
    option(
        "--peers", required=True, help="all nodes as NAME=ADDRESS, with commas between; the coordinator first"
    )
    option("--rendezvous-port", type=int, default=12355, help="MASTER_PORT (default 12355)")
    option("--ephemeral-port", type=int, required=True, help="any free high port, the same on all nodes")
    option("--expected-mbit", type=float, default=1000, help="the links' speed in Mbit/s (default 1000)")
    option("--measure-seconds", type=float, default=0.4, help="seconds per ordered pair (default 0.4)")
    option("--patience", type=float, default=12, help="seconds that a peer may be late (default 12)")
    option("--time-limit", type=float, default=55, help="seconds for everything (default 55)")
    given = parser.parse_args(argv)
    peers: dict[str, str] = {}
    for word in given.peers.split(","):
        name, equals, address = word.partition("=")
        if not name or not equals or not address or name in peers or address in peers.values():
            parser.error(f"--peers: {word!r} is not NAME=ADDRESS, or comes twice")
        peers[name] = address
    if given.node not in peers:
        parser.error(f"--node {given.node} is not among --peers")
    settings = Settings(
        node=given.node,
        peers=peers,
        rendezvous_port=given.rendezvous_port,
        ephemeral_port=given.ephemeral_port,
        patience=given.patience,
        measure_seconds=given.measure_seconds,
        expected_mbit=given.expected_mbit,
    )
    return settings, given.time_limit


def main(argv: list[str] | None = None) -> int:
    try:
        settings, time_limit = parse(argv)
    except SystemExit as stop:
        return 64 if stop.code else 0
    document: Json = {}
    work = threading.Thread(target=run, args=(settings, document), daemon=True)
    work.start()
    work.join(time_limit)
    print(json.dumps(dict(document)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
