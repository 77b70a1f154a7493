"""All parts together; see the package."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aura.check.probe import limits
from aura.check.probe.caller import connect, measure_clock, open_port, send_bytes, try_all
from aura.check.probe.coordinator import Coordinator, obey
from aura.check.probe.host import listening
from aura.check.probe.node import describe_node
from aura.check.probe.wire import SCHEMA, Json, Refusal, Settings
from aura.errors import in_words


def run(settings: Settings, document: Json) -> None:
    """Fills the document, section by section, so that what is known can be printed at any moment."""
    document.update(schema=SCHEMA, node=settings.node, coordinator=settings.coordinator, complete=False)
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
            silent: Json = {"ok": False, "error": in_words("probe_silent")}
            found = send_bytes(settings, peer, port) if port else silent
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
        reason = in_words("probe_does_not_answer", node=settings.coordinator)
        return {"ok": False, "error": reason}, reason
    clock = measure_clock(settings, port)
    try:
        control = connect(settings, settings.coordinator, port, "control")
    except Refusal as problem:
        return clock, in_words("probe_no_longer_answers", node=settings.coordinator, error=problem)
    try:
        return clock, obey(control, measure, settings.patience + limits.STRAGGLER_GRACE)
    finally:
        control.close()
