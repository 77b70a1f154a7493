"""What NVIDIA's module says in a kernel's own log is found there, once, and ends what computes on that card.

Lines are written to /dev/kmsg, as gpud's inject-fault does; the card that they speak of is synthetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from aura.watch.health import Past, judge
from aura.watch.readings import GpuReading, Reading
from machines import ROOT, Machine

CARD = GpuReading("GPU-1", 0, "NVIDIA RTX 4090", pci="0000:01:00", temperature=60)
FALLEN = "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, name=python, GPU has fallen off the bus."
OF_ANOTHER = "NVRM: Xid (PCI:0000:02:00): 43, pid=1234, name=python, Ch 00000008"
# Python of the node: in there is no environment yet. `after` is the record that was seen last.
LOOK = """
python3 - {after} <<'END'
import json, sys
sys.path.insert(0, "/run/kernel-log")
from kernel_log import KMSG, KernelLog, boot
log = KernelLog(int(sys.argv[1]))
{between}
print(json.dumps([boot(), log.new(), log.after]))
END
"""
# More than the kernel keeps, while the log is open.
FLOOD = """
log.new()
for number in range(4000):
    KMSG.write_text(f"line {number} " + "of no interest " * 20)
KMSG.write_text("%s\\n")  # a line that may still be continued is not given to anybody
"""


def test_a_fault_in_the_kernels_log_is_found_once(vm: Callable[..., Machine]) -> None:
    machine = vm()
    # As ordinary PCs have it, the kernel takes ten lines in five seconds from programs.
    machine.exec("echo on >/proc/sys/kernel/printk_devkmsg && mkdir -p /run/kernel-log")
    module = (ROOT / "training/aura/watch/kernel_log.py").read_text(encoding="utf-8")
    machine.exec(f"cat >/run/kernel-log/kernel_log.py <<'END'\n{module}\nEND")

    def look(after: int, between: str = "") -> tuple[str, list[tuple[str, int, str]], int]:
        boot, xids, last = json.loads(machine.exec(LOOK.format(after=after, between=between)))
        return boot, [(pci, number, words) for pci, number, words in xids], last

    boot, xids, last = look(-1)
    assert xids == []
    assert boot == machine.boot_id()
    for line in (f"<3>{FALLEN}", "NVRM: GPU at PCI:0000:01:00", f"<3>{OF_ANOTHER}"):
        machine.exec(f"echo '{line}' >/dev/kmsg")
    _, xids, later = look(last)
    assert [(pci, number) for pci, number, _ in xids] == [("0000:01:00", 79), ("0000:02:00", 43)]
    assert look(later)[1] == []

    before = {CARD.uuid: Past(last=asdict(CARD))}
    # The kernel's word counts at once; a driver that does not list the card may only have been asked badly.
    readings = [Reading(1e9, boot, [], xids), Reading(1e9 + 10, boot, [], [])]
    found = [[(finding.kind, finding.trips) for finding in judge(before, reading)] for reading in readings]
    assert found == [[("xid", True)], [("lost", True)]]

    assert [number for _, number, _ in look(later, FLOOD % FALLEN)[1]] == [79]
