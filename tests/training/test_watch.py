"""aura watch: from readings to faults. The readings are synthetic: no card has ever told these tests anything. The
kernel's lines have the form of NVIDIA's documentation, and of what gpud's inject-fault writes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from aura.commands import watch
from aura.errors import ConfigError
from aura.watch.faults import fault_of
from aura.watch.findings import read_findings
from aura.watch.health import Before, begin_anew, forget, judge
from aura.watch.kernel_log import KernelLog, xids_in
from aura.watch.nvml import Gpus
from aura.watch.readings import GpuReading, Reading, reading_of
from nvidia import driver, no_driver

WELL = GpuReading(
    "GPU-1", 0, "NVIDIA RTX 4090", pci="0000:01:00", recovery_action=0, ecc=0, temperature=60, slowdown_at=90,
    shutdown_at=95, throttle=0, pcie_width=16, load=98,
)  # fmt: skip
GEFORCE = replace(WELL, ecc=None, recovery_action=None)
FALLEN = "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, name=python, GPU has fallen off the bus."


def readings(*gpus: list[GpuReading], boot: str = "b", xids: dict[int, str] | None = None) -> list[Reading]:
    """One every 5 s; `xids`: the kernel's line at the reading of this number."""
    return [
        Reading(1e9 + 5 * number, boot, cards, xids_in((xids or {}).get(number, "")))
        for number, cards in enumerate(gpus)
    ]


def found(sequence: list[Reading], before: Before | None = None) -> list[tuple[int, str, bool]]:
    """Which reading said what, and whether it ends the rank."""
    seen: Before = {} if before is None else before
    return [
        (number, finding.kind, finding.trips)
        for number, reading in enumerate(sequence)
        for finding in judge(seen, reading)
    ]


def steady(count: int, **values: Any) -> list[list[GpuReading]]:
    return [[replace(WELL, **values)]] * count


NO_LIMIT: dict[str, Any] = {"slowdown_at": None, "shutdown_at": None}
CASES: dict[str, tuple[list[Reading], list[tuple[int, str, bool]]]] = {
    "well": (readings(*steady(200)), []),
    "a card that counts no errors": (readings(*[[GEFORCE]] * 50), []),
    "one new error of memory": (readings(*steady(3), *steady(3, ecc=1)), [(3, "ecc", True)]),
    "errors from before anybody looked": (readings(*steady(3, ecc=40)), [(0, "ecc", True)]),
    "errors, then more": (readings(*steady(2, ecc=1), *steady(2, ecc=3)), [(0, "ecc", True), (2, "ecc", True)]),
    "lost": (readings(*steady(2), *steady(3, lost="GPU is lost")), [(3, "lost", True)]),
    "one question that failed": (readings(*steady(2), *steady(1, lost="Timeout"), *steady(2), []), []),
    "not listed any more": (readings(*steady(2), [], []), [(3, "lost", True)]),
    "lost, back, lost": (readings(*([*steady(1), [], []] * 2)), [(2, "lost", True), (5, "lost", True)]),
    "its driver asks for a reset": (readings(*steady(1), *steady(2, recovery_action=1)), [(1, "recovery", True)]),
    "a row of memory pending": (readings(*steady(2, remap_pending=True)), [(0, "remap_pending", True)]),
    "a row of memory lost": (
        readings(*steady(2, remap_failed=True, remap_pending=True)), [(0, "remap_failed", True)]),
    "fallen off the bus": (readings(*steady(3), xids={1: FALLEN}), [(1, "xid", True)]),
    "a program's error": (readings(*steady(2), xids={0: FALLEN.replace("79", "31")}), [(0, "xid", False)]),
    "a program that was ended": (readings(*steady(2), xids={0: FALLEN.replace("79", "45")}), []),
    "dealt with": (readings(*steady(2), xids={0: FALLEN.replace("79", "63")}), []),
    "another card's": (readings(*steady(2), xids={0: FALLEN.replace("01:00", "02:00")}), []),
    "unknown": (readings(*steady(2), xids={0: FALLEN.replace("79", "999")}), [(0, "xid", False)]),
    "near the slowdown, for a moment": (readings(*steady(6, temperature=86), *steady(3)), []),
    "near the slowdown": (readings(*steady(20, temperature=85)), [(6, "hot", False)]),
    "near its end, once": (readings(*steady(1, temperature=91), *steady(3)), []),
    "near its end": (readings(*steady(3, temperature=90)), [(1, "shutdown", True)]),
    "hot, of a card that names no limit": (
        readings(*steady(20, **NO_LIMIT, temperature=86)), [(6, "hot_assumed", False)]),
    "too hot, of a card that names no limit": (
        readings(*steady(20, **NO_LIMIT, temperature=91)), [(6, "hot_assumed", False), (6, "shutdown_assumed", True)]),
    "too hot for a moment, of a card that names none": (
        readings(*steady(5, **NO_LIMIT, temperature=95), *steady(2)), []),
    "a card that does not say how warm it is": (
        readings(*steady(5, temperature=None)), [(0, "unread", False)]),
    # The mask 0x48 is heat and the generic bit: a warning when it lasts, and never a fault.
    "held back by heat, for a moment": (readings(*steady(12, throttle=0x48), *steady(3)), []),
    "held back by heat": (readings(*steady(20, throttle=0x48)), [(12, "throttled", False)]),
    "held back by heat, often": (
        readings(*([*steady(1, throttle=0x40), *steady(3)] * 7)), [(20, "throttled", False)]),
    "by its power supply": (readings(*steady(20, throttle=0x88)), [(12, "power", False)]),
    "by its own power limit": (readings(*steady(50, throttle=0x4)), []),
    "narrow, idle": (readings(*steady(2), *steady(50, pcie_width=4, load=0)), []),
    "narrow under load": (readings(*steady(2), *steady(20, pcie_width=4)), [(14, "narrow", False)]),
    "always narrow: the board is made so": (readings(*steady(50, pcie_width=4)), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_readings_say(name: str) -> None:
    sequence, expected = CASES[name]
    assert found(sequence) == expected


def test_fewer_lanes_are_said_once_and_not_after_every_start_of_the_machine() -> None:
    """A second card has been put in."""
    before: Before = {}
    assert found(readings(*steady(2), *steady(20, pcie_width=8)), before) == [(14, "narrow", False)]
    begin_anew(before["GPU-1"])
    assert found(readings(*steady(20, pcie_width=8)), before) == []


def test_what_a_program_says_trips_only_when_it_says_it_again() -> None:
    error = ("GPU-1", "CUDA error: an illegal memory access was encountered")
    sequence = [Reading(1e9 + 600 * number, "b", [WELL], cuda=[error]) for number in range(3)]
    assert [trips for _, _, trips in found(sequence)] == [False, False, True]
    rarely = [Reading(1e9 + 3000 * number, "b", [WELL], cuda=[error]) for number in range(5)]
    assert not any(trips for _, _, trips in found(rarely))
    assert found([Reading(1e9, "b", [WELL], cuda=[("GPU-2", "CUDA error")])]) == []


def test_the_same_after_two_restarts_is_a_broken_part() -> None:
    before: Before = {}
    remedies = []
    for boot in "abc":
        (sequence,) = readings([WELL], boot=boot, xids={0: FALLEN})
        remedies += [finding.remedy for finding in judge(before, sequence)]
    assert remedies[0] == remedies[1] and "Switch the PC off" in remedies[0]
    assert "Restarts have not helped" in remedies[2]
    forget(before["GPU-1"])
    (sequence,) = readings([WELL], boot="d", xids={0: FALLEN})
    assert judge(before, sequence)[0].remedy == remedies[0]


def test_a_card_that_was_taken_out_is_no_fault_any_more_once_somebody_has_said_so() -> None:
    before: Before = {}
    other = replace(WELL, uuid="GPU-2")
    assert found(readings(*steady(1), [other], [other]), before) == [(2, "lost", True)]
    forget(before["GPU-1"])
    assert found(readings([other], [other]), before) == []
    back_and_lost = readings([WELL, other], [other], [other])
    assert found(back_and_lost, before) == [(2, "lost", True)]


def test_errors_of_runs_long_ago_are_not_counted(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("state", "faults", "runs")}
    words = ["--once", *(word for name, path in places.items() for word in (f"--{name}", str(path)))]
    watcher = watch.Watcher(watch._parser().parse_args(words))
    now = time.time()
    error = "CUDA error: an illegal memory access"
    for number, ago in enumerate((30, 20, 10, 0)):
        status = {"rank": 0, "state": "failed", "message": error, "exit_code": 1}
        rank = places["runs"] / f"r{number}/rank-0"
        rank.mkdir(parents=True)
        (rank / "status.json").write_text(json.dumps(status | {"gpu": "GPU-1", "updated": now - 86400 * ago}))
    assert watcher._errors_of_cuda() == [("GPU-1", error)]
    assert watcher._errors_of_cuda() == []
    # Who was taken along by another PC's rank has it in the same words.
    status |= {"rank": 1, "gpu": "GPU-1", "updated": now, "exit_code": 75}
    status["message"] = f"rank 2 on node2: {error}"
    (places["runs"] / "r0/rank-0/status.json").write_text(json.dumps(status))
    assert watcher._errors_of_cuda() == []
    # Who has begun anew before anybody looked.
    last = {"state": "failed", "exit_code": 1, "message": "CUDA error: misaligned", "updated": now - 2}
    status |= {"state": "joining", "exit_code": None, "message": "", "before": last}
    (places["runs"] / "r0/rank-0/status.json").write_text(json.dumps(status))
    assert watcher._errors_of_cuda() == [("GPU-1", "CUDA error: misaligned")]
    assert watcher._errors_of_cuda() == []


def record(file: Path, sequence: list[Reading]) -> None:
    file.write_text("".join(json.dumps(asdict(reading)) + "\n" for reading in sequence))


def test_a_full_disk_hides_no_heat(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes two looks, of one process."""
    with suppress(OSError):
        (small_disk / "filler").write_bytes(b"0" * 65536)
    file, faults = tmp_path / "readings.jsonl", tmp_path / "faults"
    record(file, readings(*steady(3, temperature=90)))
    assert watch.main(["--state", str(small_disk), "--faults", str(faults), "--replay", str(file)]) == 0
    assert fault_of(faults, "GPU-1")
    assert capsys.readouterr().out.count("No space left on device. What was seen is kept there") == 1


def test_recorded_readings_are_judged_again_and_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "readings.jsonl"
    sequence = readings(*steady(3), *steady(20, temperature=85), xids={1: FALLEN})
    record(file, sequence)
    assert [reading_of(json.loads(line)) for line in file.read_text().splitlines()] == sequence
    places = {name: tmp_path / name for name in ("state", "faults")}
    words = [word for name, path in places.items() for word in (f"--{name}", str(path))] + ["--node", "node3"]
    assert watch.main([*words, "--replay", str(file)]) == 0
    fallen, hot = capsys.readouterr().out.splitlines()
    assert fallen.startswith("GPU 0 (NVIDIA RTX 4090): the driver reports XID 79")
    assert "launch.yml --limit" in fallen
    assert "is at 85 °C" in hot
    events = [event for _, event in read_findings(places["faults"], "")]
    told = [(event.kind, event.severity, event.host) for event in events]
    assert told == [("gpu.fault", "critical", "node3"), ("gpu.warning", "warning", "node3")]
    assert events[0].facts["gpu"] == {"uuid": "GPU-1", "index": 0, "name": "NVIDIA RTX 4090"}
    fault = fault_of(places["faults"], "GPU-1")
    assert fault and "node3: GPU 0" in str(fault) and "Switch the PC off" in str(fault)

    # What still holds is said once, also by who is started again; after a repair it is looked at anew.
    record(file, [replace(reading, time=reading.time + 100) for reading in sequence[3:]])
    assert watch.main([*words, "--replay", str(file)]) == 0
    assert capsys.readouterr().out == ""
    (places["faults"] / "GPU-1.json").unlink()
    assert watch.main([*words, "--replay", str(file)]) == 0
    assert "is at 85 °C" in capsys.readouterr().out
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1 is no reading"):
        watch.main([*words, "--replay", str(file)])
    with pytest.raises(ConfigError, match="cannot be read"):
        watch.main([*words, "--replay", str(tmp_path / "none")])


def test_without_a_driver_it_goes_on_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_driver(monkeypatch)
    monkeypatch.setattr(watch, "KernelLog", lambda after: SimpleNamespace(after=after, new=lambda: []))
    monkeypatch.setattr(watch.time, "sleep", stop_after(3))
    with pytest.raises(KeyboardInterrupt):
        watch.main(["--state", str(tmp_path / "state"), "--faults", str(tmp_path), "--runs", str(tmp_path)])
    assert capsys.readouterr().out.count("There is no GPU") == 1


def test_a_driver_that_cannot_be_opened_has_lost_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library has another version after an upgrade; who trains already goes on."""
    places = {name: tmp_path / name for name in ("state", "faults", "runs")}
    words = ["--once", *(word for name, path in places.items() for word in (f"--{name}", str(path)))]
    monkeypatch.setattr(watch, "KernelLog", lambda after: SimpleNamespace(after=after, new=lambda: []))
    driver(monkeypatch, 1, UUID=lambda _: "GPU-1", Name=lambda _: "RTX 4090", Temperature=lambda *_: 60)
    assert watch.main(words) == 0
    with monkeypatch.context() as broken:
        no_driver(broken, pynvml.NVMLError_LibRmVersionMismatch)
        assert watch.main(words) == 0
        assert fault_of(places["faults"], "GPU-1") is None and not list(read_findings(places["faults"], ""))
    driver(monkeypatch, 0)
    for _ in range(2):
        assert watch.main(words) == 0
    assert fault_of(places["faults"], "GPU-1"), "the driver is there, and does not list it"


def stop_after(count: int) -> Callable[[float], None]:
    left = iter(range(count - 1))

    def sleep(_: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return sleep


def test_a_card_that_stops_answering_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's answers, as its documentation has them."""
    lost = False

    def handle(index: int) -> int:
        if lost and index == 1:
            raise pynvml.NVMLError_GpuIsLost
        return index

    driver(
        monkeypatch,
        2,
        HandleByIndex=handle,
        UUID=lambda index: f"GPU-{index}",
        Name=lambda _: "NVIDIA RTX 4090",
        PciInfo=lambda index: SimpleNamespace(domain=0, bus=index + 1, device=0),
        Temperature=lambda _, which: 70,
        RemappedRows=lambda _: [0, 0, 1, 0],
    )
    gpus = Gpus()
    zero, one = gpus.read()
    assert one == GpuReading(
        "GPU-1", 1, "NVIDIA RTX 4090", "0000:02:00", temperature=70, remap_pending=True, remap_failed=False
    )
    lost = True
    assert gpus.read() == [zero, GpuReading("GPU-1", 1, one.name, one.pci, lost="GPU is lost")]


def fields(values: dict[int, int]) -> Callable[[int, list[int]], list[SimpleNamespace]]:
    """nvmlDeviceGetFieldValues of a card that knows these."""

    def answer(_: int, ids: list[int]) -> list[SimpleNamespace]:
        found = [
            (values.get(field, 0), 0 if field in values else pynvml.NVML_ERROR_NOT_SUPPORTED) for field in ids
        ]
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(siVal=value)) for value, code in found]

    return answer


ADA = {pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT: -2, pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT: -7}
OLD = {pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 93, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 98}


@pytest.mark.parametrize(
    ("answers", "limits"),
    [
        pytest.param(
            {"FieldValues": fields(ADA), "MarginTemperature": lambda _: 49}, (92, 97), id="RTX 40 and 50"
        ),
        pytest.param({"TemperatureThreshold": lambda _, which: OLD[which]}, (93, 98), id="older"),
        pytest.param(
            {"FieldValues": fields({}), "MarginTemperature": lambda _: 0}, (None, None), id="says none"
        ),
        pytest.param({"FieldValues": fields(ADA)}, (None, None), id="a driver that does not know the margin"),
        pytest.param({"TemperatureThreshold": lambda *_: 0}, (None, None), id="0 for none"),
    ],
)
def test_at_which_heat_a_card_protects_itself(
    answers: dict[str, Any], limits: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVML's documentation and nvidia-smi -q have it; no such card has told this test anything."""
    driver(monkeypatch, 1, UUID=lambda _: "GPU-1", Name=lambda _: "RTX", Temperature=lambda *_: 41, **answers)
    (gpu,) = Gpus().read()
    assert (gpu.slowdown_at, gpu.shutdown_at) == limits


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sentence": "x"}'])
def test_a_fault_that_cannot_be_read_is_none_the_less_one(content: str, tmp_path: Path) -> None:
    assert fault_of(tmp_path, "GPU-1") is None
    (tmp_path / "GPU-1.json").write_text(content)
    assert "GPU-1.json says that this GPU is unhealthy, and cannot be read" in str(
        fault_of(tmp_path, "GPU-1")
    )


def test_the_kernels_log_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel's documentation describes /dev/kmsg: one record per read, EPIPE where some were thrown away."""
    lines = {7: "usb 1-1: new", 8: FALLEN, 9: FALLEN}
    records = [f"4,{number},123456,-;{words}\n" for number, words in lines.items()]
    waiting: list[str | Exception] = []

    def read(_: int, __: int) -> bytes:
        if not waiting:
            raise BlockingIOError
        record = waiting.pop(0)
        if isinstance(record, Exception):
            raise record
        return record.encode()

    log = KernelLog(path=Path(os.devnull))
    again = KernelLog(after=8, path=Path(os.devnull))
    monkeypatch.setattr(os, "read", read)
    waiting += records[:2]
    assert log.new() == [("0000:01:00", 79, "pid=1234, name=python, GPU has fallen off the bus.")]
    assert log.new() == [] and log.after == 8
    waiting += [BrokenPipeError(), records[2]]
    assert len(log.new()) == 1
    waiting += records
    assert len(again.new()) == 1
