"""`aura probe`: what this node sees of its peers, as JSON, for playbooks/connectivity.yml.

Standard library only: it answers in a second, and where torch is broken. Exit codes: 0 the document was printed
(whatever it says), 64 wrong usage.
"""

from __future__ import annotations

import json
import threading

from aura.check.probe.run import run
from aura.check.probe.wire import Json, Settings
from aura.errors import Parser
from aura.texts.console import text


def parse(argv: list[str]) -> tuple[Settings, float]:
    parser = Parser(prog="aura probe", description="What this node sees of its peers, as JSON.")
    option = parser.add_argument
    option("--node", required=True, help="this node's name in the inventory")
    option(
        "--peers", required=True, help="all nodes as NAME=ADDRESS, with commas between; the coordinator first"
    )
    option("--rendezvous-port", type=int, default=12355, help="MASTER_PORT (default 12355)")
    option("--ephemeral-port", type=int, required=True, help="any free high port, the same on all nodes")
    option("--expected-mbit", type=float, default=1000, help="the links' speed in Mbit/s (default 1000)")
    option("--patience", type=float, default=12, help="seconds that a peer may be late (default 12)")
    option("--time-limit", type=float, default=55, help="seconds for everything (default 55)")
    given = parser.parse_args(argv)
    peers: dict[str, str] = {}
    for word in given.peers.split(","):
        name, equals, address = word.partition("=")
        if not name or not equals or not address or name in peers or address in peers.values():
            parser.error(text("peer_wrong", word=word))
        peers[name] = address
    if given.node not in peers:
        parser.error(text("node_not_among_peers", node=given.node))
    settings = Settings(
        node=given.node,
        peers=peers,
        rendezvous_port=given.rendezvous_port,
        ephemeral_port=given.ephemeral_port,
        patience=given.patience,
        expected_mbit=given.expected_mbit,
    )
    return settings, given.time_limit


def main(argv: list[str]) -> int:
    settings, time_limit = parse(argv)
    document: Json = {}
    work = threading.Thread(target=run, args=(settings, document), daemon=True)
    work.start()
    work.join(time_limit)
    print(json.dumps(dict(document)), flush=True)
    return 0
