"""Sets the fact `boot`: what a restart of the node meets. It changes nothing.

Ansible's setup knows nothing of that: docs/decisions/0005-cards-and-the-next-start.md. Run it as root.

ansible_facts.boot:
    passphrase       whether a person has to open a disk at each start
    windows          who starts Windows instead of this system: firmware, GRUB, or ""
    boot_entry       where it is the firmware: the number of this system's own entry, for efibootmgr
    live             whether this is a live system, which forgets what was installed
    wsl              whether this is Linux under Windows (WSL 2), which only Windows starts
    reboot_required  whether something installed waits for the next start
"""

from __future__ import annotations

import os
import re
from itertools import takewhile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node import in_container, in_wsl, read_file


def asks_passphrase(crypttab: str) -> bool:
    """Whether a person opens a disk at boot: no key file and no TPM does. (A FIDO2 key wants to be touched.)"""
    rows = [line.split("#")[0].split() for line in crypttab.splitlines()]
    for _, _, key, options, *_ in ([*row, "none", ""] for row in rows if len(row) > 1):
        if key in ("none", "-") and not re.search("noauto|tpm2-device=|keyscript=", options):
            return True
    return False


def is_live(command_line: str) -> bool:
    """Whether a medium (a USB stick, say) has started this system."""
    return bool(re.search(r"\bboot=(casper|live)\b|/casper/|/live/vmlinuz", command_line))


def own_entry_behind_windows(listing: str) -> str:
    """The number of this system's entry where the firmware starts Windows before it; "" elsewhere.

    listing: what efibootmgr prints. Entries before ours (network, a stick) were tried at this start too and let us by.
    """
    found = dict(re.findall(r"^(BootCurrent|BootNext|BootOrder): (\S+)", listing, re.MULTILINE))
    windows = re.findall(r"^Boot(\w{4})\* [^\t\n]*windows", listing, re.MULTILINE | re.IGNORECASE)
    own = found.get("BootCurrent", "")
    order = [found.get("BootNext", ""), *found.get("BootOrder", "").split(",")]
    return own if any(number in windows for number in takewhile(lambda one: one != own, order)) else ""


def grub_starts_windows(config: str, environment: str) -> bool:
    """config: grub.cfg. environment: grubenv."""
    kept = dict(re.findall(r"^(\w+)=(.*)$", environment, re.MULTILINE))
    default = re.search(r'^\s*set default="(?!\$\{next_entry\})([^"]*)"', config, re.MULTILINE)
    wanted = default[1] if default else ""
    if wanted == "${saved_entry}":
        wanted = kept.get("saved_entry", "")
    wanted = (kept.get("next_entry") or wanted or "0").partition(">")[0]
    entries = re.findall(r"^(?:menuentry|submenu) '([^']*)'(.*)", config, re.MULTILINE)
    return any(
        "windows" in f"{title}{rest}".lower()
        for number, (title, rest) in enumerate(entries)
        if wanted in (str(number), title) or f"'{wanted}'" in rest
    )


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    efibootmgr = module.get_bin_path("efibootmgr")
    entry = own_entry_behind_windows(module.run_command([efibootmgr])[1]) if efibootmgr else ""
    grub = grub_starts_windows(read_file("/boot/grub/grub.cfg"), read_file("/boot/grub/grubenv"))
    boot = {
        "passphrase": asks_passphrase(read_file("/etc/crypttab")),
        "windows": "firmware" if entry else "GRUB" if grub else "",
        "boot_entry": entry,
        "live": is_live(read_file("/proc/cmdline")) and not in_container(),
        "wsl": in_wsl(),
        "reboot_required": os.path.exists("/run/reboot-required"),
    }
    module.exit_json(changed=False, ansible_facts={"boot": boot})


if __name__ == "__main__":
    main()
