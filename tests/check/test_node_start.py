"""What a restart meets, from the texts that the node has."""

from pathlib import Path

import pytest
import tree

START = tree.plugin("module_utils/node_start")


@pytest.mark.parametrize(
    ("crypttab", "asks"),
    [
        ("", False),
        ("# <target> <source> <key file> <options>\n", False),
        ("dm_crypt-0 UUID=0a1b none luks\n", True),
        ("dm_crypt-0 UUID=0a1b\n", True),
        ("sda3_crypt UUID=0a1b none luks,discard,initramfs\n", True),
        ("data UUID=0a1b /etc/keys/data luks\n", False),
        ("data UUID=0a1b none luks,noauto\n", False),
        ("root UUID=0a1b none luks,tpm2-device=auto\n", False),
        ("root UUID=0a1b none luks,fido2-device=auto\n", True),  # it wants to be touched
        ("data UUID=0a1b none plain,cipher=aes-xts-plain64\n", True),
        ("swap /dev/sda2 /dev/urandom swap,cipher=aes-xts-plain64\n", False),
    ],
)
def test_a_disk_that_waits_for_a_person(crypttab: str, asks: bool) -> None:
    assert START.asks_passphrase(crypttab) is asks


@pytest.mark.parametrize(
    ("command_line", "live"),
    [
        ("BOOT_IMAGE=/vmlinuz-5.15.0-203-generic root=/dev/mapper/ubuntu--vg-ubuntu--lv ro splash", False),
        ("BOOT_IMAGE=/casper/vmlinuz layerfs-path=minimal.standard.live.squashfs --- quiet splash", True),
        ("BOOT_IMAGE=/live/vmlinuz-6.1.0-26-amd64 boot=live components quiet splash", True),
    ],
)
def test_a_system_that_forgets(command_line: str, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/cmdline": command_line, "/etc/crypttab": "dm_crypt-0 UUID=0a1b none luks"}
    monkeypatch.setattr(START, "read_file", lambda path: texts.get(path, ""))
    monkeypatch.setattr(START, "in_container", lambda: False)
    assert START.read_start() | {"passphrase": True, "live": live} == START.read_start()
    monkeypatch.setattr(START, "in_container", lambda: True)  # the command line is its host's
    assert START.read_start()["live"] is False


def variable(place: Path, name: str, content: bytes) -> None:
    """As the kernel shows it: four bytes before the content say what kind of variable it is."""
    (place / f"{name}-{START.GLOBAL}").write_bytes(b"\x07\0\0\0" + content)


def entry(place: Path, number: int, name: str, active: bool = True) -> None:
    """EFI_LOAD_OPTION: attributes, the length of the path, the name; the path is left out."""
    content = bytes([active, 0, 0, 0, 4, 0]) + f"{name}\0".encode("utf-16-le") + b"\x7f\xff\4\0"
    variable(place, f"Boot{number:04X}", content)


# A PC with both systems; efibootmgr lists Boot0000* Windows Boot Manager, Boot0003* ubuntu, Boot0004* UEFI: PXE.
@pytest.mark.parametrize(
    ("order", "following", "active", "windows"),
    [
        pytest.param([3, 0, 4], [], True, "", id="Ubuntu first"),
        pytest.param([0, 3, 4], [], True, "firmware", id="Windows first"),
        pytest.param([4, 0, 3], [], True, "firmware", id="Windows before it"),
        pytest.param([4, 3, 0], [], True, "", id="the network first, which let us by"),
        pytest.param([0, 3, 4], [], False, "", id="Windows first, and switched off"),
        pytest.param([0, 3, 4], [3], True, "", id="Windows first, and the next start is told"),
        pytest.param([3, 0, 4], [0], True, "firmware", id="somebody has told the next start"),
        pytest.param([0, 4], [], True, "firmware", id="Ubuntu is in no order"),
    ],
)
def test_who_the_firmware_starts(
    order: list[int], following: list[int], active: bool, windows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    entry(tmp_path, 0, "Windows Boot Manager", active)
    entry(tmp_path, 3, "ubuntu")
    entry(tmp_path, 4, "UEFI: PXE IPv4 Intel(R) Ethernet")
    for name, numbers in {"BootCurrent": [3], "BootOrder": order, "BootNext": following}.items():
        if numbers:
            variable(tmp_path, name, b"".join(number.to_bytes(2, "little") for number in numbers))
    monkeypatch.setattr(START, "EFI", str(tmp_path))
    monkeypatch.setattr(START, "read_file", lambda path: "")
    found = START.read_start()
    assert (found["windows"], found["boot_entry"]) == (windows, "0003" if windows else "")


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
def test_who_grub_starts(default: str, kept: str, windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/boot/grub/grub.cfg": GRUB.format(default=default), "/boot/grub/grubenv": kept}
    monkeypatch.setattr(START, "EFI", "/nonexistent")
    monkeypatch.setattr(START, "read_file", lambda path: texts.get(path, ""))
    assert START.read_start()["windows"] == ("GRUB" if windows else "")
