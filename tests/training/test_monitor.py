"""aura monitor on this machine, and on a machine with GPUs that NVIDIA's library would describe so."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from aura.check.monitor import Reading, trains
from aura.commands import monitor
from aura.errors import ConfigError
from nvidia import driver, no_driver, raises

TIME = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"
SYSTEM = TIME + r" CPU: \d+\.\d% \| RAM: \d+\.\d% \(\d+\.\d GB / \d+\.\d GB\) \| RAM proceso: "


def test_without_a_driver_it_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AURA_LANG", "es")
    no_driver(monkeypatch)
    shown = []

    def stop_after_three(reading: Reading) -> list[str]:
        shown.append(reading)
        if len(shown) == 3:
            raise KeyboardInterrupt
        return lines(reading)

    lines = monitor.lines
    monkeypatch.setattr(monitor, "lines", stop_after_three)
    assert monitor.main(["--interval", "0.1", "--pid", str(os.getpid())]) == 0
    out, error = capsys.readouterr()
    assert error == "Sin GPU NVIDIA: NVML Shared Library Not Found.\n"
    assert re.fullmatch(rf"({SYSTEM}\d+\.\d GB\n){{2}}", out), out


def test_one_reading_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_driver(monkeypatch)
    assert monitor.main(["--once", "--json", "--interval", "0.1", "--pid", str(os.getpid())]) == 0
    reading = json.loads(capsys.readouterr().out)
    memory = pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert reading["processes"] == {str(os.getpid()): memory}
    assert reading["ram_total_bytes"] == psutil.virtual_memory().total
    assert reading["gpus"] == []
    links = psutil.net_if_stats().items()
    assert set(reading["links"]) == {name for name, card in links if card.isup and name != "lo"}


def test_gpus_in_the_guides_form(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """GPU 1 does not say how busy it is, GPU 2 has fallen off the bus."""

    def handle(index: int) -> int:
        return raises(pynvml.NVMLError_GpuIsLost)() if index == 2 else index

    def load(index: int) -> SimpleNamespace:
        return raises(pynvml.NVMLError_NotSupported)() if index == 1 else SimpleNamespace(gpu=89)

    monkeypatch.setenv("AURA_LANG", "es")
    memory = SimpleNamespace(used=int(12.1 * 2**30), total=24 * 2**30)
    driver(
        monkeypatch,
        3,
        HandleByIndex=handle,
        Name=lambda _: "NVIDIA RTX 4090",
        UtilizationRates=load,
        MemoryInfo=lambda _: memory,
        PowerUsage=raises(pynvml.NVMLError_NoPermission),
    )
    monkeypatch.setattr(psutil, "process_iter", lambda _: [])
    assert monitor.main(["--once", "--interval", "0.1"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(SYSTEM + "ninguno", first), first
    assert rest == [
        "  - GPU 0 (NVIDIA RTX 4090) | Utilización: 89% | Memoria: 12.1 GB / 24.0 GB",
        "  - GPU 1 (NVIDIA RTX 4090) | Utilización: ? | Memoria: 12.1 GB / 24.0 GB",
        "  - GPU 2 | no responde: GPU is lost",
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/opt/aura/current/venv/bin/python /opt/aura/current/venv/bin/aura train --preset x", True),
        ("python3 -m aura train --preset x", True),
        ("/usr/bin/python3.11 -u -m aura train --preset x", True),  # below torchrun
        ("python3 /usr/bin/torchrun --nnodes=5 -m aura train --preset x", False),
        ("python3 -m torch.distributed.run --nnodes=5 -m aura train --preset x", False),
        ("python -m aura monitor", False),
        ("vim aura.txt train", False),
        ("python3 /v/bin/torchrun --standalone -m aura train", False),
        ("train", False),
    ],
)
def test_who_trains(command: str, expected: bool) -> None:
    assert trains(command.split()) is expected


def test_an_interval_of_nothing_is_refused() -> None:
    for interval in ("0", "-1", "nan"):
        with pytest.raises(ConfigError, match=r"at least 0\.1"):
            monitor.main(["--interval", interval])
