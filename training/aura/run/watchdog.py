"""systemd's watchdog: a rank that hangs is ended and started again. Standard library only.

The protocol is sd_notify(3): datagrams to $NOTIFY_SOCKET. The unit says in AURA_WATCHDOG after how many seconds of
silence; elsewhere nothing happens. The trainer asks for the watchdog itself, in place of WatchdogSec: a run that stays
on an older release, or goes back to one, does not know it, and must not be ended for its silence.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from contextlib import suppress

from aura.cluster.activity import COMPUTING, Activity
from aura.texts.console import put, text

STDERR = 2
PAUSE = 1.0  # seconds between two messages


def start(activity: Activity) -> None:
    """Tell systemd that this process lives, from a thread, until `activity` says that the main thread hangs."""
    address, seconds = os.environ.get("NOTIFY_SOCKET"), os.environ.get("AURA_WATCHDOG", "")
    if not address or not seconds.isdecimal() or int(seconds) == 0:
        return
    faulthandler.enable(STDERR)  # systemd ends a hung process with SIGABRT: the journal shows where it hung
    arguments = (address, int(seconds), activity)
    threading.Thread(target=_beat, args=arguments, name="watchdog", daemon=True).start()


def hangs(activity: Activity) -> bool:
    """While others watch this rank, it may wait for one of them: that one is to blame, and the process group says
    so."""
    report = activity.report()
    return report.is_overdue() and (activity.alone or report.doing == COMPUTING)


def _beat(address: str, seconds: int, activity: Activity) -> None:
    target = "\0" + address[1:] if address.startswith("@") else address
    said, begun = 0, False  # the step that was called hung; does systemd listen?
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        while True:
            if not hangs(activity):
                with suppress(OSError):
                    notify.sendto(
                        b"WATCHDOG=1" if begun else f"WATCHDOG_USEC={seconds}000000".encode(), target
                    )
                    begun = True
            elif said != (report := activity.report()).step:
                said = report.step
                put(text("this_rank_hangs", report=report))
            time.sleep(PAUSE)
