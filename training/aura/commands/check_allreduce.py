"""`aura check-allreduce`: all ranks add their numbers, and each one checks the sum it got.

Exit codes: 0 the sum was right, 1 it was not or somebody was missing, 64 wrong usage.
"""

from __future__ import annotations

import os
import sys
import threading

from aura.check import allreduce
from aura.errors import ConfigError, Parser
from aura.texts.console import put, text


def main(argv: list[str]) -> int:
    parser = Parser(prog="aura check-allreduce", description="Let all ranks add numbers and check the sum.")
    backends = ["auto", "gloo", "nccl"]
    parser.add_argument(
        "--backend",
        choices=backends,
        default="auto",
        help="auto: nccl where all ranks are on one node and each has a GPU",
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds for everything (default 60)")
    given = parser.parse_args(argv)
    if not 0 < given.timeout <= 600:
        raise ConfigError("timeout_wrong")
    me = allreduce.read_environment()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its stack traces hide our sentence
    import torch.distributed  # noqa: F401 - takes seconds, which do not count

    watchdog = threading.Timer(given.timeout + 2 * allreduce.GOODBYE + 5, give_up, (me, given.timeout))
    watchdog.daemon = True
    watchdog.start()
    try:
        allreduce.check(me, given.backend, allreduce.Deadline(given.timeout), put)
    finally:
        watchdog.cancel()
    return 0


def give_up(me: allreduce.Rank, seconds: float) -> None:
    """The last resort, from a thread of its own: a collective that hangs cannot be interrupted."""
    print(me.label("?"), text("all_reduce_hangs", seconds=seconds), file=sys.stderr, flush=True)
    os._exit(1)
