"""What a restart meets, from the texts that the node has."""

from __future__ import annotations

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
        (
            "BOOT_IMAGE=/vmlinuz-5.15.0-203-generic root=/dev/mapper/ubuntu--vg-ubuntu--lv ro quiet splash",
            False,
        ),
        ("BOOT_IMAGE=/casper/vmlinuz layerfs-path=minimal.standard.live.squashfs --- quiet splash", True),
        ("BOOT_IMAGE=/live/vmlinuz-6.1.0-26-amd64 boot=live components quiet splash", True),
    ],
)
def test_a_system_that_forgets(command_line: str, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/cmdline": command_line, "/etc/crypttab": "dm_crypt-0 UUID=0a1b none luks"}
    monkeypatch.setattr(START, "read", texts.__getitem__)
    monkeypatch.setattr(START, "in_container", lambda: False)
    assert START.start() == {"passphrase": True, "live": live}
    monkeypatch.setattr(START, "in_container", lambda: True)  # the command line is its host's
    assert START.start()["live"] is False
