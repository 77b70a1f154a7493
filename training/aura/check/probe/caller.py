"""The side that connects: reaches the peers, compares clocks, sends the bytes of a measurement."""

from __future__ import annotations

import errno
import socket
import threading
import time

from aura.check.probe import limits
from aura.check.probe.wire import Json, Line, Refusal, Settings
from aura.errors import in_words


def connect(settings: Settings, peer: str, port: int, want: str) -> Line:
    """Connects from this node's LAN address, checks who answers, and says what it wants. Raises Refusal."""
    address = settings.peers[peer]
    try:
        # With port 0 as source the kernel picks one.
        connection = socket.create_connection((address, port), limits.CONNECT_TIMEOUT, (settings.address, 0))
    except OSError as error:
        raise refusal(error) from error
    line = Line(connection)
    try:
        greeting = line.receive(limits.CONNECT_TIMEOUT)
        if "aura_probe" not in greeting:
            raise OSError(in_words("probe_no_greeting"))
        if greeting.get("node") == peer:
            line.send({"node": settings.node, "want": want})
            return line
    except TimeoutError as error:
        line.close()
        raise Refusal("silent", in_words("probe_nothing_said")) from error
    except ConnectionError as error:
        line.close()
        raise Refusal("closed", in_words("probe_closed_at_once")) from error
    except OSError as error:
        line.close()
        raise Refusal("silent", in_words("probe_connected_but", error=error)) from error
    line.close()
    raise Refusal("wrong node", str(greeting.get("node")))


def refusal(error: OSError) -> Refusal:
    """The error of a connect(), in our words."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Refusal("timeout", in_words("probe_no_answer"))
    if error.errno == errno.ECONNREFUSED:
        return Refusal("refused", in_words("probe_refused"))
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return Refusal("unreachable", error.strerror or in_words("probe_unreachable"))
    if error.errno == errno.EADDRNOTAVAIL:
        return Refusal("no address", in_words("probe_no_address"))
    return Refusal("error", error.strerror or str(error))


def try_port(settings: Settings, peer: str, port: int, deadline: float) -> Json:
    """Tries until the peer greets or the deadline (monotonic) has passed. Two kinds of answer are final at once:
    the wrong node, and a program that accepts but says nothing (twice)."""
    silences = 0
    while True:
        try:
            connect(settings, peer, port, "hello").close()
            return {"ok": True}
        except Refusal as problem:
            silences += problem.kind == "silent"
            final = problem.kind in ("wrong node", "no address") or silences > 1
            if final or time.monotonic() + limits.RETRY_PAUSE >= deadline:
                return {"ok": False, "error": problem.kind, "detail": str(problem)}
        time.sleep(limits.RETRY_PAUSE)


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
        thread.join(max(0.0, deadline + 3 * limits.CONNECT_TIMEOUT - time.monotonic()))
    missing: Json = {"ok": False, "error": "error", "detail": in_words("probe_did_not_end")}
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
    best: tuple[float, float] | None = None
    try:
        line = connect(settings, settings.coordinator, port, "clock")
        try:
            for _ in range(exchanges):
                sent, mono = settings.now(), time.monotonic()
                line.send({"want": "time"})
                answer = line.receive(limits.CONNECT_TIMEOUT)
                back = sent + (time.monotonic() - mono)
                trip = (back - sent) - (answer["sent"] - answer["received"])
                ahead = ((answer["received"] - sent) + (answer["sent"] - back)) / 2
                best = min(best, (trip, -ahead)) if best else (trip, -ahead)
        finally:
            line.close()
    except (Refusal, OSError, KeyError, TypeError) as problem:
        if best is None:
            return {"ok": False, "error": str(problem)}
    assert best is not None
    return {"ok": True, "offset_seconds": best[1]}


def send_bytes(settings: Settings, peer: str, port: int) -> Json:
    """Sends to the peer for `limits.MEASURE` seconds; the rate is what the peer counted. Never raises."""
    try:
        line = connect(settings, peer, port, "bandwidth")
        try:
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.SEND_BUFFER)
            line.socket.settimeout(limits.CONNECT_TIMEOUT)
            payload = bytes(limits.CHUNK)
            end = time.monotonic() + limits.MEASURE
            while time.monotonic() < end:
                line.socket.sendall(payload)
            line.socket.shutdown(socket.SHUT_WR)
            counted = line.receive(limits.CONNECT_TIMEOUT)
        finally:
            line.close()
        if counted["seconds"] <= 0:
            return {"ok": False, "error": in_words("probe_too_little")}
        return {"ok": True, "mbit_per_second": round(counted["bytes"] * 8 / counted["seconds"] / 1e6, 1)}
    except TimeoutError:
        return {"ok": False, "error": in_words("probe_stalled")}
    except (Refusal, OSError, KeyError, TypeError) as problem:
        return {"ok": False, "error": str(problem)}
