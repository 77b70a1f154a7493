"""The lease on a node: hold-lock runs this text there as root, over ssh.

The lock belongs to one run until a moment that every `renew` moves on. So it outlives a connection that the node's move
to another address cuts, and ends by itself with its run; a boot empties its file.
Arguments: renew or release; seconds that the lease lasts; the run (JSON, with its token). Prints the run that has it
instead, and for how many seconds; {} when it is ours, or free.
"""

import contextlib
import fcntl
import json
import os
import sys
import time

PLACE = "/run/aura-site.lock"  # where root alone makes files

release, lasts, run = sys.argv[1] == "release", float(sys.argv[2]), json.loads(sys.argv[3])
lock = os.open(PLACE, os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
now = time.clock_gettime(time.CLOCK_BOOTTIME)  # nobody sets this clock
found = {}
with contextlib.suppress(ValueError, KeyError, TypeError):
    said = json.loads(os.pread(lock, 65536, 0))
    found = said if now < said["until"] else {}
if found and found["token"] != run["token"]:
    print(json.dumps({**found, "for": now - found["since"]}))
else:
    entry = "" if release else json.dumps({**run, "since": found.get("since", now), "until": now + lasts})
    os.ftruncate(lock, 0)
    os.pwrite(lock, entry.encode(), 0)
    print("{}")
