"""XIDs: what NVIDIA's kernel module says of its cards, in /dev/kmsg.

NVRM: Xid (PCI:0000:01:00): 79, pid=1234, name=python, GPU has fallen off the bus.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

KMSG = Path("/dev/kmsg")
BOOT = Path("/proc/sys/kernel/random/boot_id")
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)(?:,\s*(.*))?")
LONGEST = 8192  # bytes of one record


def boot() -> str:
    return BOOT.read_text(encoding="ascii").strip()


def xids_in(lines: str) -> list[tuple[str, int, str]]:
    """PCI address, number and the rest of every such line."""
    return [(pci.lower(), int(number), (words or "").strip()) for pci, number, words in XID.findall(lines)]


class KernelLog:
    """What is new since the last look; `after`: the number of the last record that was seen in this start of the
    machine, -1 for none. The kernel keeps what came before anybody looked. Raises OSError."""

    def __init__(self, after: int = -1, path: Path = KMSG) -> None:
        self.after = after
        self.file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def new(self) -> list[tuple[str, int, str]]:
        found = []
        while record := self._record():
            head, _, words = record.partition(";")
            number = int(head.split(",")[1])
            if number > self.after:
                self.after = number
                found += xids_in(words)
        return found

    def _record(self) -> str:
        while True:
            with suppress(BrokenPipeError):  # the kernel has thrown away what comes next: go on behind it
                try:
                    return os.read(self.file, LONGEST).decode(errors="replace")
                except BlockingIOError:
                    return ""
