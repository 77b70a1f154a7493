"""Whether this machine comes back from a restart by itself, and with what was installed before it."""

from __future__ import annotations

import os
import platform
import re
import struct

from ansible.module_utils.node_read import read_file


def in_container() -> bool:
    """Whether the kernel, its command line and the cards on the bus are those of a host."""
    return any(map(os.path.exists, ("/run/systemd/container", "/.dockerenv", "/run/.containerenv")))


def in_wsl() -> bool:
    """Whether this is Linux under Windows (WSL 2), and not a container there.

    /run/WSL is where Windows's own programs are called, with whatever kernel. systemd takes WSL for a container.
    """
    if os.path.isdir("/run/WSL"):
        return True
    other = in_container() and read_file("/run/systemd/container") != "wsl"
    return "microsoft" in platform.release().lower() and not other


def asks_passphrase(crypttab: str) -> bool:
    """Whether a disk is opened by a person at boot: no key file, and nothing else that opens it.

    A FIDO2 key is no such thing: unless told otherwise it wants to be touched.
    """
    for line in crypttab.splitlines():
        words = line.split("#")[0].split()
        if len(words) < 2:
            continue
        key = words[2] if len(words) > 2 else "none"
        options = words[3] if len(words) > 3 else ""
        by_itself = re.search(r"(^|,)(noauto|tpm2-device=|keyscript=)", options)
        if key in ("none", "-") and not by_itself:
            return True
    return False


def is_live(command_line: str) -> bool:
    """Whether the kernel was started by a medium (a USB stick, say) whose system forgets."""
    return bool(re.search(r"\bboot=(casper|live)\b|/casper/|/live/vmlinuz", command_line))


EFI = "/sys/firmware/efi/efivars"
GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
GRUB = "/boot/grub"
ENTRY = re.compile(r"^(?:menuentry|submenu) '((?:[^']|'\\'')*)'(.*)", re.MULTILINE)


def efi_variable(name: str) -> bytes:
    """Without the four bytes that say what kind of variable it is; empty when there is none."""
    try:
        with open(f"{EFI}/{name}-{GLOBAL}", "rb") as file:
            return file.read()[4:]
    except OSError:
        return b""


def efi_numbers(name: str) -> list[int]:
    content = efi_variable(name)
    return [number for (number,) in struct.iter_unpack("<H", content[: len(content) // 2 * 2])]


def firmware_starts() -> tuple[str, str]:
    """What the firmware starts next when that is Windows, and the number by which it started this system.

    An entry before ours that is no Windows (a network card, a stick) was tried at this start too, and let us by.
    """
    current = efi_numbers("BootCurrent")
    order = [*efi_numbers("BootNext"), *efi_numbers("BootOrder")]
    before = order[: order.index(current[0])] if current and current[0] in order else order
    for number in before if current else []:
        option = efi_variable(f"Boot{number:04X}")
        active = option[:1] and option[0] & 1  # LOAD_OPTION_ACTIVE
        name = option[6:].decode("utf-16-le", errors="replace").partition("\0")[0]
        if active and "windows" in name.lower():
            return name, f"{current[0]:04X}"
    return "", ""


def grub_starts(config: str, environment: str) -> str:
    """The entry that GRUB starts next when that is Windows. config: grub.cfg. environment: grubenv."""
    kept = dict(re.findall(r"^(\w+)=(.*)$", environment, re.MULTILINE))
    told = re.search(r'^\s*set default="(?!\$\{next_entry\})([^"]*)"', config, re.MULTILINE)
    wanted = told[1] if told else "0"
    if wanted == "${saved_entry}":
        wanted = kept.get("saved_entry", "")
    wanted = (kept.get("next_entry") or wanted or "0").partition(">")[0]
    for number, (title, rest) in enumerate(ENTRY.findall(config)):
        named = re.search(r"\$menuentry_id_option '([^']*)'", rest)
        if wanted in (str(number), title, named[1] if named else title):
            return title if "--class windows" in rest or "windows" in title.lower() else ""
    return ""


def read_start() -> dict[str, object]:
    """`passphrase`: a person has to open a disk. `live`: what was installed is gone afterwards. `windows`: who starts
    it in our place, firmware or GRUB, or nobody. `boot_entry`: ours in the firmware, where that starts Windows.
    """
    firmware, entry = firmware_starts()
    grub = grub_starts(read_file(f"{GRUB}/grub.cfg"), read_file(f"{GRUB}/grubenv"))
    return {
        "passphrase": asks_passphrase(read_file("/etc/crypttab")),
        "live": not in_container() and is_live(read_file("/proc/cmdline")),
        "windows": "firmware" if firmware else "GRUB" if grub else "",
        "boot_entry": entry,
    }
