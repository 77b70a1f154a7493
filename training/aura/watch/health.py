"""From readings of GPUs to what is wrong with them: a function of what was seen before and what is read now.

Which XID asks for what: NVIDIA's XID catalog, and DCGM's list of devastating ones. Pages that retire a row of memory
(43, 63, 92 say that something was dealt with) and the end of a program (45) are no fault. Where a limit is ours, its
comment says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from aura.texts.console import text
from aura.watch.readings import GpuReading, Reading

RESET, REBOOT, RESTART = "reset", "reboot", "restart"
XIDS = {
    **dict.fromkeys((46, 48, 62, 64, 74, 95, 109, 119, 120, 140), RESET),
    79: REBOOT,  # it has fallen off the bus
    **dict.fromkeys((13, 31, 32, 69, 94), RESTART),
}
IGNORED_XIDS = (43, 45, 63, 92)
ACTIONS = {1: RESET, 2: REBOOT, 3: RESET, 4: RESET}  # NVML_GPU_RECOVERY_ACTION_*
# nvmlClocksEventReason*; 0x8 (hardware slowdown) comes with the first or the last of these, and says nothing more.
SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x20, 0x40, 0x80
NEAR = 5  # °C to a threshold
ASSUMED = 90  # °C, of a card that names no limit (ours)
HOT_FOR = 30.0  # seconds near the slowdown
HELD_BACK_FOR = 60.0  # seconds without a break (ours)
OFTEN, WITHIN = 6, 600.0  # gpud: 0.6 such events a minute, over ten minutes
NARROW_FOR, LOADED = 60.0, 50  # seconds and % (ours): an idle card may save power with fewer lanes
CUDA_ERRORS, CUDA_WITHIN = 3, 3600.0  # from so many on they are no accident any more (ours)
SAME_AGAIN = 2  # restarts of the machine after which the same fault is one of its parts (gpud)


@dataclass(frozen=True)
class Finding:
    """`trips`: nothing more shall be computed on this GPU. Otherwise a person is told, and training goes on."""

    kind: str
    trips: bool
    gpu: GpuReading
    sentence: str
    remedy: str


@dataclass
class Past:
    """Of one GPU; times are those of readings."""

    last: dict[str, Any] = field(default_factory=dict)  # the last reading, while it answered
    ecc: int = 0  # errors that have been spoken of
    width: int = 0  # the most lanes that were seen
    since: dict[str, float] = field(default_factory=dict)  # when a condition began that still holds
    held_back: list[float] = field(default_factory=list)  # when it began to be held back by heat
    was_hot: int = 0  # readings in a row near the shutdown
    was_lost: int = 0  # readings in a row without an answer: once may be the driver's
    cuda: list[float] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # what has been said and still holds
    tripped: bool = False
    boots: dict[str, list[str]] = field(default_factory=dict)  # the starts of the machine that had a fault


Before = dict[str, Past]  # by UUID


def judge(before: Before, reading: Reading) -> list[Finding]:
    """What is new; `before` is brought up to date, so the same reading twice says nothing the second time."""
    here = {gpu.uuid for gpu in reading.gpus}
    gone = [
        replace(GpuReading(**past.last), lost=text("gpu_not_listed"))
        for uuid, past in before.items()
        if past.last and uuid not in here and reading.answered
    ]
    findings = []
    for gpu in [*reading.gpus, *gone]:
        past = before.setdefault(gpu.uuid, Past())
        new = [
            *_lost(gpu, past), *_said_by_the_kernel(gpu, reading), *_memory(gpu, past), *_heat(gpu, past, reading.time),
            *_held_back(gpu, past, reading.time), *_narrow(gpu, past, reading.time), *_cuda(gpu, past, reading),
        ]  # fmt: skip
        if not gpu.lost:
            past.last = asdict(gpu)
        findings += [_again(finding, past, reading.boot) for finding in new]
    return findings


def begin_anew(past: Past) -> None:
    """The machine has been restarted: what still holds is said once more, and what comes back is counted."""
    past.open, past.since, past.tripped, past.was_hot, past.was_lost = [], {}, False, 0, 0


def forget(past: Past) -> None:
    """Somebody has repaired it: what comes from now on is new."""
    begin_anew(past)
    past.last, past.boots, past.cuda = {}, {}, []  # it may have been taken out


def _finding(kind: str, trips: bool, gpu: GpuReading, remedy: str, **values: object) -> Finding:
    what = text(f"gpu_{kind}", gpu=text("gpu_called", index=gpu.index, name=gpu.name), **values)
    return Finding(kind, trips, gpu, what, text(f"remedy_{remedy}"))


def _once(past: Past, key: str, holds: bool) -> bool:
    """Is this new? What no longer holds may come again."""
    if holds and key not in past.open:
        past.open.append(key)
        return True
    if not holds and key in past.open:
        past.open.remove(key)
    return False


def _lasts(past: Past, key: str, holds: bool, now: float, seconds: float) -> bool:
    if not holds:
        past.since.pop(key, None)
        return False
    return now - past.since.setdefault(key, now) >= seconds


def _lost(gpu: GpuReading, past: Past) -> Iterator[Finding]:
    past.was_lost = past.was_lost + 1 if gpu.lost else 0
    if _once(past, "lost", past.was_lost >= 2):
        yield _finding("lost", True, gpu, REBOOT, reason=gpu.lost)
    action = ACTIONS.get(gpu.recovery_action or 0)
    if _once(past, "recovery", action is not None):
        yield _finding("recovery", True, gpu, action or RESET)


def _said_by_the_kernel(gpu: GpuReading, reading: Reading) -> Iterator[Finding]:
    for pci, number, words in reading.xids:
        if not gpu.pci or pci.lower() != gpu.pci.lower() or number in IGNORED_XIDS:
            continue
        remedy = XIDS.get(number, "unknown")
        yield _finding("xid", remedy in (RESET, REBOOT), gpu, remedy, number=number, words=words)


def _memory(gpu: GpuReading, past: Past) -> Iterator[Finding]:
    if gpu.ecc is not None:
        if gpu.ecc > past.ecc:
            yield _finding("ecc", True, gpu, RESET, count=gpu.ecc - past.ecc)
        past.ecc = gpu.ecc  # after a restart of the driver it counts from 0 again
    if _once(past, "remap_failed", bool(gpu.remap_failed)):
        yield _finding("remap_failed", True, gpu, "replace")
    if _once(past, "remap_pending", bool(gpu.remap_pending) and not gpu.remap_failed):
        yield _finding("remap_pending", True, gpu, RESET)


def _heat(gpu: GpuReading, past: Past, now: float) -> Iterator[Finding]:
    if _once(past, "unread", gpu.temperature is None and not gpu.lost):
        yield _finding("unread", False, gpu, "unread")
    if gpu.temperature is None:
        return
    values = {"temperature": gpu.temperature}
    if gpu.slowdown_at is gpu.shutdown_at is None:
        for kind, trips, limit in (
            ("hot_assumed", False, ASSUMED - NEAR),
            ("shutdown_assumed", True, ASSUMED),
        ):
            lasts = _lasts(past, kind, gpu.temperature >= limit, now, HOT_FOR)
            if _once(past, kind, lasts):
                yield _finding(kind, trips, gpu, "cool", limit=ASSUMED, **values)
        return
    near_end = gpu.shutdown_at is not None and gpu.temperature >= gpu.shutdown_at - NEAR
    past.was_hot = past.was_hot + 1 if near_end else 0
    if _once(past, "shutdown", past.was_hot >= 2):
        yield _finding("shutdown", True, gpu, "cool", limit=gpu.shutdown_at, **values)
    near = gpu.slowdown_at is not None and gpu.temperature >= gpu.slowdown_at - NEAR
    lasts = _lasts(past, "hot", near, now, HOT_FOR)
    if _once(past, "hot", lasts):
        yield _finding("hot", False, gpu, "cool", limit=gpu.slowdown_at, **values)


def _held_back(gpu: GpuReading, past: Past, now: float) -> Iterator[Finding]:
    bits = gpu.throttle or 0
    by_heat = bool(bits & (SW_THERMAL | HW_THERMAL))
    if by_heat and "heat" not in past.since:
        past.held_back.append(now)
    past.held_back = [moment for moment in past.held_back if now - moment <= WITHIN]
    lasts = _lasts(past, "heat", by_heat, now, HELD_BACK_FOR)
    # Often is often until the ten minutes are over.
    if _once(past, "throttled", lasts or len(past.held_back) >= OFTEN):
        yield _finding("throttled", False, gpu, "cool")
    lasts = _lasts(past, "power", bool(bits & POWER_BRAKE), now, HELD_BACK_FOR)
    if _once(past, "power", lasts):
        yield _finding("power", False, gpu, "power")


def _narrow(gpu: GpuReading, past: Past, now: float) -> Iterator[Finding]:
    if gpu.pcie_width is None:
        return
    past.width = max(past.width, gpu.pcie_width)
    narrow = gpu.pcie_width < past.width
    if narrow and (gpu.load or 0) < LOADED:
        return  # what was begun under load is neither over nor proved
    lasts = _lasts(past, "narrow", narrow, now, NARROW_FOR)
    if _once(past, "narrow", lasts):
        yield _finding("narrow", False, gpu, "reseat", lanes=gpu.pcie_width, before=past.width)
        past.width = gpu.pcie_width  # it may have got a neighbour: said once, this is what it has


def _cuda(gpu: GpuReading, past: Past, reading: Reading) -> Iterator[Finding]:
    now = reading.time
    for uuid, words in reading.cuda:
        if uuid == gpu.uuid:
            past.cuda = [moment for moment in [*past.cuda, now] if now - moment <= CUDA_WITHIN]
            trips = len(past.cuda) >= CUDA_ERRORS
            yield _finding("cuda", trips, gpu, RESET if trips else RESTART, words=words, count=len(past.cuda))


def _again(finding: Finding, past: Past, boot: str) -> Finding:
    """The same after two restarts is no accident of the driver: a part is broken."""
    if not finding.trips:
        return finding
    past.tripped = True
    boots = past.boots.setdefault(finding.kind, [])
    if boot not in boots:
        boots.append(boot)
    return replace(finding, remedy=text("remedy_replace")) if len(boots) > SAME_AGAIN else finding
