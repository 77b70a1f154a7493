"""What gpu_facts and boot_facts read on a node: from the texts that drivers, firmware and files give."""

import os
from pathlib import Path
from typing import Any

import pytest
import tree

GPU, BOOT, NODE = (
    tree.plugin("modules/gpu_facts"),
    tree.plugin("modules/boot_facts"),
    tree.plugin("module_utils/node"),
)
# As nvidia-smi writes what is asked for; its third line is an error that it prints among them.
SMI = """\
GPU-5a1e, 00000000:01:00.0, 8.6, 580.95.05, Enabled, Disabled, 12288, 170.00, 170.00, 100.00, 212.00, NVIDIA RTX 3060
GPU-77aa, 00000000:C1:00.0, 7.5, 580.95.05, Disabled, Enabled, 4096, [N/A], [N/A], [N/A], [N/A], NVIDIA GTX 1650, Mobile
Unable to determine the device handle for GPU0000:41:00.0: Unknown Error
"""


def test_the_cards_are_those_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {
        "0000:00:02.0": ("0x8086", "0x4680", "0x030000"),
        "0000:01:00.0": ("0x10de", "0x2504", "0x030000"),
        "0000:01:00.1": ("0x10de", "0x228e", "0x040300"),  # its sound
        "0000:c1:00.0": ("0x10de", "0x1af1", "0x068000"),  # an NVSwitch
    }
    for slot, texts in devices.items():
        (tmp_path / slot).mkdir()
        for name, text in zip(("vendor", "device", "class"), texts, strict=True):
            (tmp_path / slot / name).write_text(f"{text}\n")
    (tmp_path / "0000:01:00.0/driver").symlink_to("../../../../bus/pci/drivers/nouveau")
    monkeypatch.setattr(GPU, "PCI", str(tmp_path))
    (card,) = map(GPU.read_card, GPU.on_bus("0x03"))
    assert card == {
        "pci": "0000:01:00.0", "device_id": "10de:2504", "generation": "Ampere", "capability": "8.0",
        "boot_vga": False, "bound": "nouveau",
    }  # fmt: skip
    machine = GPU.read_machine("")
    assert machine["nouveau"] and machine["switches"] and not machine["installed"]


def test_what_nvidia_smi_says_of_the_cards() -> None:
    first, second = GPU.smi_cards(SMI)
    assert first == {
        "uuid": "GPU-5a1e", "name": "NVIDIA RTX 3060", "pci": "0000:01:00.0", "compute_capability": "8.6",
        "memory_mib": 12288, "display_active": True, "persistence": False, "driver": "580.95.05",
        "power_limit": 170.0, "power_default": 170.0, "power_min": 100.0, "power_max": 212.0,
    }  # fmt: skip
    assert (second["name"], second["pci"], second["power_max"]) == (
        "NVIDIA GTX 1650, Mobile",
        "0000:c1:00.0",
        0.0,
    )


@pytest.mark.parametrize("memory", ["[N/A]", "[Unknown Error]", "[GPU requires reset]"])
def test_a_card_that_does_not_say_its_memory_has_none(memory: str) -> None:
    first, second = GPU.smi_cards(SMI.replace("12288", memory))
    assert (first["memory_mib"], second["memory_mib"]) == (0, 4096)


def test_which_packages_are_installed_and_whose_they_are() -> None:
    ubuntu, nvidia = "Ubuntu Developers <u@lists.ubuntu.com>", "NVIDIA <cudatools@nvidia.com>"
    machine = GPU.read_machine(
        f"installed\tnvidia-utils-580-server\t580.178.04-0ubuntu0.22.04.1\t{ubuntu}\n"
        f"installed\tnvidia-container-toolkit\t1.17.8-1\t{nvidia}\n"  # no part of a driver
        f"installed\tnvidia-driver-550\t550.54.15-0ubuntu1\t{nvidia}\n"
        f"installed\tlibnvidia-compute-550\t550.120-0ubuntu0~gpu22.04.1\t{ubuntu}\n"
        f"config-files\tnvidia-utils-470\t470.1\t{ubuntu}\n"
    )
    assert machine["installed"] == "580.178.04" and "nvidia-utils-470" not in machine["packages"]
    assert machine["foreign"] == ["libnvidia-compute-550", "nvidia-driver-550"]


@pytest.mark.parametrize(("driver", "says"), [("591.44", SMI.splitlines()[0]), ("", "")])
def test_in_wsl_windows_program_knows_the_card(
    driver: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PCI bus there has no card."""
    for name, value in {"in_wsl": True, "in_container": True}.items():
        monkeypatch.setattr(GPU, name, lambda value=value: value)
    monkeypatch.setattr(GPU, "PCI", "/nonexistent")
    monkeypatch.setattr(os.path, "exists", lambda path: path == GPU.WSL_SMI)

    class Module:
        def run_command(self, words: list[str], **_: Any) -> tuple[int, str, str]:
            assert GPU.WSL_SMI in words
            return code, says.replace("580.95.05", driver), ""

    code = 15
    assert GPU.read_gpus(Module())["smi"] == [], "what it prints when it fails is no answer"
    code = 0
    found = GPU.read_gpus(Module())
    assert (found["elsewhere"], found["driver"], len(found["smi"]), found["machine"]) == (
        "WSL",
        driver,
        bool(says),
        {},
    )


# The first and the last number of each run of a generation in the PCI ID database, October 2026.
@pytest.mark.parametrize(
    ("first", "last", "generation"),
    [
        ("0fa0", "130b", "Kepler"), ("1340", "1436", "Maxwell"), ("15c2", "15ff", "Pascal"),
        ("1613", "1676", "Maxwell"), ("1725", "172f", "Pascal"), ("174d", "17fd", "Maxwell"),
        ("1b00", "1d56", "Pascal"), ("1d81", "1df6", "Volta"),
        ("1e02", "1ff9", "Turing"), ("2080", "20ff", "Ampere"), ("2182", "21d1", "Turing"), ("2200", "223f", "Ampere"),
        ("2302", "23f0", "Hopper"), ("2414", "25fb", "Ampere"), ("2681", "28f8", "Ada"), ("2900", "3400", "Blackwell"),
    ],
)  # fmt: skip
def test_generations_as_the_database_has_them(first: str, last: str, generation: str) -> None:
    assert GPU.generation(f"10de:{first}") == GPU.generation(f"10de:{last}") == generation


WSL_KERNEL, PC_KERNEL = "6.6.87.2-microsoft-standard-WSL2", "5.15.0-203-generic"


# Synthetic: WSL's kernel names, and what its systemd leaves in /run, as public reports show them.
@pytest.mark.parametrize(
    ("kernel", "paths", "container", "wsl"),
    [
        pytest.param(PC_KERNEL, [], "", False, id="a PC"),
        pytest.param(WSL_KERNEL, ["/run/WSL", "/run/systemd/container"], "wsl", True, id="WSL with systemd"),
        pytest.param(WSL_KERNEL, [], "", True, id="WSL before systemd"),
        pytest.param("6.6.87-mine", ["/run/WSL"], "", True, id="WSL with a kernel of one's own"),
        pytest.param(WSL_KERNEL, ["/run/systemd/container"], "systemd-nspawn", False, id="nspawn on WSL"),
        pytest.param(WSL_KERNEL, ["/.dockerenv"], "", False, id="docker on WSL"),
    ],
)
def test_what_is_wsl(
    kernel: str, paths: list[str], container: str, wsl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NODE.platform, "release", lambda: kernel)
    monkeypatch.setattr(NODE, "read_file", lambda path: container)
    monkeypatch.setattr(os.path, "exists", lambda path: path in paths)
    monkeypatch.setattr(os.path, "isdir", lambda path: path in paths)
    assert NODE.in_wsl() is wsl


@pytest.mark.parametrize(
    ("crypttab", "asks"),
    [
        ("# <target> <source> <key file> <options>\n", False),
        ("dm_crypt-0 UUID=0a1b none luks\n", True),
        ("dm_crypt-0 UUID=0a1b\n", True),
        ("data UUID=0a1b /etc/keys/data luks\n", False),
        ("data UUID=0a1b none luks,noauto\n", False),
        ("root UUID=0a1b none luks,tpm2-device=auto\n", False),
        ("root UUID=0a1b none luks,fido2-device=auto\n", True),  # it wants to be touched
        ("swap /dev/sda2 /dev/urandom swap,cipher=aes-xts-plain64\n", False),
    ],
)
def test_a_disk_that_waits_for_a_person(crypttab: str, asks: bool) -> None:
    assert BOOT.asks_passphrase(crypttab) is asks


@pytest.mark.parametrize(
    ("command_line", "live"),
    [
        ("BOOT_IMAGE=/vmlinuz-5.15.0-203-generic root=/dev/mapper/ubuntu--vg-ubuntu--lv ro splash", False),
        ("BOOT_IMAGE=/casper/vmlinuz layerfs-path=minimal.standard.live.squashfs --- quiet splash", True),
        ("BOOT_IMAGE=/live/vmlinuz-6.1.0-26-amd64 boot=live components quiet splash", True),
    ],
)
def test_a_system_that_forgets(command_line: str, live: bool) -> None:
    assert BOOT.is_live(command_line) is live


@pytest.mark.parametrize(
    ("order", "active", "windows"),
    [
        pytest.param("BootOrder: 0003,0000,0004", "*", "", id="Ubuntu first"),
        pytest.param("BootOrder: 0000,0003,0004", "*", "0003", id="Windows first"),
        pytest.param("BootOrder: 0004,0000,0003", "*", "0003", id="Windows before it"),
        pytest.param("BootOrder: 0004,0003,0000", "*", "", id="the network first, which let us by"),
        pytest.param("BootOrder: 0000,0003,0004", " ", "", id="Windows first, and switched off"),
        pytest.param(
            "BootNext: 0003\nBootOrder: 0000,0003", "*", "", id="Windows first, and the next start is told"
        ),
        pytest.param(
            "BootNext: 0000\nBootOrder: 0003,0000", "*", "0003", id="the next start is told: Windows"
        ),
    ],
)
def test_who_the_firmware_starts(order: str, active: str, windows: str) -> None:
    """A PC with both systems, as efibootmgr 18 lists it (17, of Ubuntu 22.04, leaves out the paths)."""
    listing = (
        f"BootCurrent: 0003\nTimeout: 1 seconds\n{order}\nBoot0000{active} Windows Boot Manager\tHD(1,GPT,7e2a)\n"
        "Boot0003* ubuntu\tHD(1,GPT,7e2a)/File(\\EFI\\ubuntu\\shimx64.efi)\nBoot0004* UEFI: PXE IPv4\n"
    )
    assert BOOT.own_entry_behind_windows(listing) == windows
    assert BOOT.own_entry_behind_windows("EFI variables are not supported on this system.\n") == ""


# The lines of Ubuntu 22.04's grub.cfg that decide, with os-prober switched on.
GRUB = """\
if [ "${{next_entry}}" ] ; then
   set default="${{next_entry}}"
   set next_entry=
else
   set default="{default}"
fi
menuentry 'Ubuntu' --class ubuntu --class gnu-linux $menuentry_id_option 'gnulinux-simple-0a1b' {{
}}
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-0a1b' {{
	menuentry 'Ubuntu, with Linux 6.8.0-138-generic' --class ubuntu $menuentry_id_option 'gnulinux-6.8.0-138' {{
	}}
}}
menuentry 'Windows Boot Manager (on /dev/sda1)' --class windows --class os $menuentry_id_option 'osprober-efi-7E2A' {{
}}
"""


@pytest.mark.parametrize(
    ("default", "kept", "windows"),
    [
        ("0", "", False),
        ("2", "", True),
        ("1>0", "", False),
        ("Windows Boot Manager (on /dev/sda1)", "", True),
        ("osprober-efi-7E2A", "", True),
        ("${saved_entry}", "saved_entry=osprober-efi-7E2A\n", True),
        ("${saved_entry}", "saved_entry=gnulinux-advanced-0a1b>gnulinux-6.8.0-138\n", False),
        ("${saved_entry}", "", False),
        ("0", "next_entry=2\n", True),
        ("2", "next_entry=0\n", False),
    ],
)
def test_who_grub_starts(default: str, kept: str, windows: bool) -> None:
    assert BOOT.grub_starts_windows(GRUB.format(default=default), kept) is windows
