"""What gpu_facts reads about graphics cards: from the texts that drivers, firmware and files give."""

from pathlib import Path
from typing import Any

import pytest
import tree

GPU = tree.plugin("module_utils/node_gpu")


def device(bus: Path, slot: str, **files: str) -> None:
    place = bus / slot
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name.removesuffix("_")).write_text(f"{text}\n")


def test_the_cards_are_those_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "0000:00:02.0", vendor="0x8086", device="0x4680", class_="0x030000", boot_vga="0")
    device(tmp_path, "0000:01:00.0", vendor="0x10de", device="0x2504", class_="0x030000", boot_vga="1")
    device(tmp_path, "0000:01:00.1", vendor="0x10de", device="0x228e", class_="0x040300")  # its sound
    device(tmp_path, "0000:41:00.0", vendor="0x10de", device="0x20b0", class_="0x030200")
    device(tmp_path, "0000:c1:00.0", vendor="0x10de", device="0x1af1", class_="0x068000")  # an NVSwitch
    (tmp_path / "0000:01:00.0/driver").symlink_to("../../../../bus/pci/drivers/nouveau")
    monkeypatch.setattr(GPU, "PCI", str(tmp_path))
    ampere = {"generation": "Ampere", "capability": "8.0"}
    assert GPU.cards_on_bus() == [
        ampere | {"pci": "0000:01:00.0", "device_id": "10de:2504", "boot_vga": True, "bound": "nouveau"},
        ampere | {"pci": "0000:41:00.0", "device_id": "10de:20b0", "boot_vga": False, "bound": ""},
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        # The two shapes that the modules write (nvidia.ko and its open variant).
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs@U22)", "580.95.05"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_loaded_driver_says_its_version(text: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPU, "read_file", lambda path: text)
    assert GPU.loaded_driver() == version


def test_what_nvidia_smi_says_of_the_cards() -> None:
    # Synthetic: the fields that are asked for, as nvidia-smi writes them.
    answer = (
        "GPU-5a1e, 00000000:01:00.0, 8.6, 12288, Enabled, Disabled, 580.95.05, 170.00, 170.00, 100.00, 212.00, "
        "NVIDIA GeForce RTX 3060\n"
        "GPU-77aa, 00000000:C1:00.0, 7.5, 4096, Disabled, Enabled, 580.95.05, [N/A], [N/A], [N/A], [N/A], "
        "NVIDIA GeForce GTX 1650, Mobile\n"
        "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error\n"
    )
    first, second = GPU.smi_cards(answer)
    assert first == {
        "uuid": "GPU-5a1e", "name": "NVIDIA GeForce RTX 3060", "pci": "0000:01:00.0", "compute_capability": "8.6",
        "memory_mib": 12288, "display_active": True, "persistence": False, "driver": "580.95.05",
        "power_limit": 170.0, "power_default": 170.0, "power_min": 100.0, "power_max": 212.0,
    }  # fmt: skip
    assert second["name"] == "NVIDIA GeForce GTX 1650, Mobile"
    assert (second["pci"], second["power_max"]) == ("0000:c1:00.0", 0.0)


def test_the_driver_that_runs_after_the_next_start_is_the_one_that_is_installed() -> None:
    utils = {"nvidia-utils-580-server": {"version": "580.178.04-0ubuntu0.22.04.1", "maintainer": ""}}
    toolkit = {"nvidia-container-toolkit": {"version": "1.17.8-1", "maintainer": ""}}
    assert GPU.installed(toolkit | utils) == "580.178.04"
    assert GPU.installed(toolkit) == ""


# As mokutil says it, in its package for Ubuntu 22.04.
@pytest.mark.parametrize(
    ("says", "enrolled"), [("is already enrolled", True), ("is not enrolled", False), ("", False)]
)
def test_a_key_that_the_firmware_knows(says: str, enrolled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPU, "read_output", lambda *command, **how: says and f"{command[-1]} {says}\n")
    assert GPU.signing_key_enrolled() is enrolled


def test_without_a_card_no_program_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPU, "cards_on_bus", lambda: [])
    monkeypatch.setattr(GPU, "read_output", lambda *command, **how: pytest.fail(f"{command} was started"))
    assert GPU.read_gpus()["cards"] == []


@pytest.mark.parametrize(
    ("command", "how", "says"),
    [
        ("echo 1; exit 3", {}, "1\n"),
        ("echo 1; exit 3", {"strict": True}, ""),
        ("echo 1; sleep 5", {"timeout": 1}, ""),
        ("echo 1", {"strict": True}, "1\n"),
    ],
)
def test_what_a_program_says_that_fails_or_hangs(command: str, how: dict[str, Any], says: str) -> None:
    assert GPU.read_output("sh", "-c", command, **how) == says
    assert GPU.read_output("no-such-program", **how) == ""
