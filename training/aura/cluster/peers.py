"""Which PCs of a run answer, and on which of them somebody holds a store: one knocks at all of them."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aura.cluster.rendezvous_store import KNOCK_TIMEOUT, now

# Seconds for which a rank that is missing is waited for. Leaving it out and taking it back costs two starts, so that
# waiting pays where its trainer is starting again: its PC answers. One that is silent has no power or no cable, and is
# seldom back soon (its silence is twice as long when it is left out): waiting is worth what leaving it out costs.
GRACE = 60.0
GRACE_SILENT = 8.0
# Seconds after this PC's own boot until which all are waited for: the power may have failed everywhere, and who boots
# first would leave out those that boot more slowly, with a newer checkpoint on their disks, say.
BOOTING = 180.0
# Seconds after which another PC may hold the store in place of one that holds none.
HOLDER = 12.0
HOLDER_SILENT = 4.0
# Seconds for which those that come and go hold no store, where the others may go on without them.
HOLDER_STEADY = 20.0
PAUSE = 1.0  # seconds between two knocks at one PC


@dataclass
class Answers:
    """Of one PC."""

    has_store: bool = False
    heard: float = 0.0  # when it last answered, with a store or with a refusal
    missing_since: float = 0.0  # when it had no store any more
    was_silent: bool = False  # at the first knock


class Peers:
    """Knocks from threads of its own, until it is closed. Addresses in the order of the ranks, each once."""

    def __init__(self, addresses: Iterable[str], port: int) -> None:
        self.port = port
        self.addresses: Sequence[str] = list(dict.fromkeys(addresses))
        self.began = now()
        self._answers = {address: Answers(missing_since=self.began) for address in self.addresses}
        self._first = {address: threading.Event() for address in self.addresses}
        self._closed = threading.Event()
        for address in self.addresses:
            threading.Thread(target=self._knock, args=(address,), name="peers", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def with_store(self) -> list[str]:
        """Addresses, in their order."""
        return [address for address in self.addresses if self._answers[address].has_store]

    def is_silent(self, address: str) -> bool:
        """It has not answered lately, neither yes nor no."""
        return now() - max(self._answers[address].heard, self.began) > 2 * (KNOCK_TIMEOUT + PAUSE)

    def has_had_its_time(self, address: str) -> bool:
        """The PC could have opened a store, and did not."""
        patience = HOLDER_SILENT if self._answers[address].heard < self.began else HOLDER
        known = self._first[address].is_set()
        return known and now() - self._answers[address].missing_since > patience

    def was_silent(self, address: str) -> bool:
        """When one knocked there first, which is not long ago, though this PC had been up for a while."""
        return self._answers[address].was_silent and self.began > BOOTING and now() - self.began < GRACE

    def grace(self, address: str) -> float:
        """Seconds for which a rank of this PC is waited for."""
        if now() <= BOOTING:
            return math.inf
        return GRACE_SILENT if self.is_silent(address) else GRACE

    def wait_for_first_answers(self) -> None:
        for event in self._first.values():
            event.wait(KNOCK_TIMEOUT + PAUSE)

    def _knock(self, address: str) -> None:
        answers = self._answers[address]
        while not self._closed.is_set():
            has_store, heard = knock_at(address, self.port)
            if answers.has_store and not has_store:
                answers.missing_since = now()
            answers.has_store = has_store
            if heard:
                answers.heard = now()
            elif not self._first[address].is_set():
                answers.was_silent = True
            self._first[address].set()
            time.sleep(PAUSE)


def knock_at(address: str, port: int) -> tuple[bool, bool]:
    """Is there a store, and did the PC answer at all?"""
    try:
        socket.create_connection((address, port), timeout=KNOCK_TIMEOUT).close()
        return True, True
    except ConnectionRefusedError:
        return False, True
    except OSError:
        return False, False
