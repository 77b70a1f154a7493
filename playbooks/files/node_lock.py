"""The end of the run lock that is on a node: hold-lock sends this text there and speaks with it over ssh.

The lock is a lease, kept in a file that a boot empties: it belongs to one run until a moment that every "renew" moves
on. So it outlives a connection that the node's move to another address cuts, and ends by itself with its run.
Arguments: seconds that the lease lasts, and what is written down about the run (JSON, with its token).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import sys
import time
from typing import Any

PLACE = "/run/lock/aura-site.lock"


def opened() -> int:
    """Two people may log in as two users: both may write. (Not O_CREAT at once: the kernel refuses that for a file of
    another user in a directory like this one.)"""
    try:
        return os.open(PLACE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.open(PLACE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor


def holder(descriptor: int) -> dict[str, Any]:
    """The run that holds the lock; nothing when it is free."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(os.pread(descriptor, 65536, 0))
        if clock() < found["until"]:
            return dict(found)
    return {}


def clock() -> float:
    """Seconds since the boot: nobody sets this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def renew(descriptor: int, run: dict[str, Any], lasts: float, release: bool) -> dict[str, Any]:
    """Take the lock, keep it, or give it back. Returns the run that has it instead, and for how many seconds."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        found = holder(descriptor)
        if found and found["token"] != run["token"]:
            return {**found, "for": clock() - found["since"]}
        since = found.get("since", clock())
        entry = "" if release else json.dumps({**run, "since": since, "until": clock() + lasts})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, entry.encode(), 0)
        return {}
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def main() -> None:
    lasts, run = float(sys.argv[1]), json.loads(sys.argv[2])
    descriptor = opened()
    while select.select([0], [], [], lasts)[0]:
        words = os.read(0, 4096).decode().split()
        if not words:
            return
        print(json.dumps(renew(descriptor, run, lasts, "release" in words)), flush=True)


main()
