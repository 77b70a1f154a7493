"""`aura probe`: all parts together; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable

from aura.check.probe import limits
from aura.check.probe.caller import connect, measure_clock, open_port, send_bytes, try_all
from aura.check.probe.coordinator import Coordinator, obey
from aura.check.probe.host import listening
from aura.check.probe.node import describe_node
from aura.check.probe.wire import SCHEMA, Json, Refusal, Settings


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
        deadline = started + settings.patience + limits.STRAGGLER_GRACE
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
        return clock, obey(control, measure, settings.patience + limits.STRAGGLER_GRACE)
    finally:
        control.close()


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
