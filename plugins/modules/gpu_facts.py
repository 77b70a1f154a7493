"""Sets the fact `gpu`: the node's NVIDIA cards, and what decides about their driver. It changes nothing.

Ansible's setup knows no graphics cards: docs/decisions/0005-cards-and-the-next-start.md. Run it as root.

ansible_facts.gpu:
    cards      on the PCI bus: pci (0000:01:00.0), device_id (10de:2504), generation, capability (its lowest), boot_vga,
               bound (the kernel's driver that has it, or "driver")
    driver     the version of the loaded driver; "" without one
    smi        the cards that nvidia-smi knows: FIELDS; memory in MiB, power in watts
    elsewhere  WSL or container, where the driver is another system's; "" otherwise
    machine    {} without a card of its own; else kernel, packages ({NAME: VERSION}), foreign (the driver's packages
               that are not Ubuntu's), installed (the driver's version), dkms (kernels), run_file, switches, nouveau,
               secure_boot, devices
"""

from __future__ import annotations

import glob
import os
import platform
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node import in_container, in_wsl, read_file

PCI = "/sys/bus/pci/devices"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
WSL_SMI = "/usr/lib/wsl/lib/nvidia-smi"  # where Windows puts the program that knows its driver
# Where each run of PCI device numbers begins (the PCI ID database, pci-ids.ucw.cz, October 2026).
GENERATION_FROM = [
    (0x0000, "Kepler"), (0x1340, "Maxwell"), (0x15C0, "Pascal"), (0x1600, "Maxwell"), (0x1720, "Pascal"),
    (0x1740, "Maxwell"), (0x1B00, "Pascal"), (0x1D80, "Volta"), (0x1E00, "Turing"), (0x2080, "Ampere"),
    (0x2180, "Turing"), (0x2200, "Ampere"), (0x2300, "Hopper"), (0x2400, "Ampere"), (0x2600, "Ada"),
    (0x2900, "Blackwell"),
]  # fmt: skip
CAPABILITY = {
    "Kepler": "3.0", "Maxwell": "5.0", "Pascal": "6.0", "Volta": "7.0", "Turing": "7.5", "Ampere": "8.0", "Ada": "8.9",
    "Hopper": "9.0", "Blackwell": "10.0",
}  # fmt: skip
# As nvidia-smi calls them. The name comes last: it is the maker's text.
FIELDS = {
    "uuid": "uuid", "pci": "pci.bus_id", "compute_capability": "compute_cap", "driver": "driver_version",
    "display_active": "display_active", "persistence": "persistence_mode", "memory_mib": "memory.total",
    "power_limit": "power.limit", "power_default": "power.default_limit", "power_min": "power.min_limit",
    "power_max": "power.max_limit", "name": "name",
}  # fmt: skip
DRIVER = re.compile(
    r"(nvidia-(driver|headless|utils|compute-utils|kernel-common|kernel-source|dkms|open)|libnvidia-compute"
    r"|linux-modules-nvidia|cuda-drivers)\b"
)
# The driver's, the kernels that it must fit, and what a desktop looks like.
PACKAGES = (
    "linux-image-* linux-headers-* linux-modules-nvidia-* nvidia-* libnvidia-* cuda-drivers* "
    "xserver-xorg-core gdm3 sddm lightdm"
).split()


def generation(device_id: str) -> str:
    """10de:2504 -> Ampere. A number that is higher than all known ones belongs to the newest."""
    number = int(device_id.rpartition(":")[2], 16)
    return [name for first, name in GENERATION_FROM if first <= number][-1]


def on_bus(kind: str) -> list[str]:
    """NVIDIA's devices of this class: 0x03 for graphics cards, 0x0680 for bridges (NVSwitches)."""
    return [
        place
        for place in sorted(glob.glob(f"{PCI}/*"))
        if read_file(f"{place}/vendor") == "0x10de" and read_file(f"{place}/class").startswith(kind)
    ]


def read_card(place: str) -> dict[str, object]:
    device_id = f"10de:{read_file(f'{place}/device')[2:]}"
    return {
        "pci": os.path.basename(place), "device_id": device_id, "generation": generation(device_id),
        "capability": CAPABILITY[generation(device_id)], "boot_vga": read_file(f"{place}/boot_vga") == "1",
        "bound": os.path.basename(os.path.realpath(f"{place}/driver")),
    }  # fmt: skip


def smi_cards(answer: str) -> list[dict[str, object]]:
    """From `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`; a line of another shape is left out."""
    cards = []
    for line in answer.splitlines():
        values = line.strip().split(", ", len(FIELDS) - 1)
        if len(values) == len(FIELDS):
            card: dict[str, object] = {**dict(zip(FIELDS, values))}  # noqa: B905  (Debian 11 has Python 3.9)
            # nvidia-smi writes the domain with eight digits, the kernel with four.
            card["pci"] = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", str(card["pci"]).lower())
            memory = str(card["memory_mib"])
            card["memory_mib"] = int(memory) if memory.isdecimal() else 0  # [GPU requires reset], say
            for name in ("display_active", "persistence"):
                card[name] = card[name] == "Enabled"
            for name in ("power_limit", "power_default", "power_min", "power_max"):
                text = str(card[name])  # [N/A] where the card does not say
                card[name] = float(text) if re.fullmatch(r"[\d.]+", text) else 0.0
            cards.append(card)
    return cards


def read_machine(listing: str) -> dict[str, object]:
    """listing: what dpkg-query prints of PACKAGES, by its format below."""
    rows = [line.split("\t") for line in listing.splitlines()]
    installed = [row[1:] for row in rows if row[0] == "installed"]
    # NVIDIA's repository and PPAs (graphics-drivers writes ~gpu) are others.
    foreign = [
        name
        for name, version, maker in installed
        if DRIVER.match(name)
        and ("~gpu" in version or not re.search("ubuntu|canonical", maker, re.IGNORECASE))
    ]
    utils = [version for name, version, _ in installed if re.fullmatch(r"nvidia-utils-\d+(-server)?", name)]
    return {
        "kernel": platform.release(),
        "packages": {name: version for name, version, _ in installed},
        "foreign": sorted(foreign),
        "installed": re.split(r"[^\d.]", utils[0])[0] if utils else "",
        "dkms": sorted(path.split("/")[6] for path in glob.glob("/var/lib/dkms/nvidia*/*/*/*/module")),
        "run_file": os.path.exists("/usr/bin/nvidia-uninstall"),
        "switches": bool(on_bus("0x0680")),
        "nouveau": any(read_card(place)["bound"] == "nouveau" for place in on_bus("0x03")),
        "secure_boot": read_file(SECURE_BOOT).endswith("\x01"),
        "devices": all(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"))),
    }


def read_gpus(module: AnsibleModule) -> dict[str, object]:
    """The fact. Without a card this starts no program."""

    def run(*command: str) -> tuple[int, str]:
        """Its exit code, and what it prints."""
        code, printed, _ = module.run_command(list(command), environ_update={"LC_ALL": "C.UTF-8"})
        return code, printed

    elsewhere = "WSL" if in_wsl() else "container" if in_container() else ""
    # A container sees the cards of its host. They are its own when it was given their devices.
    seen = elsewhere == "" or glob.glob("/dev/nvidia[0-9]*")
    cards = [read_card(place) for place in on_bus("0x03")] if seen else []
    loaded = (
        re.search(r"\b(\d{3}\.\d+(?:\.\d+)*)\b", read_file("/proc/driver/nvidia/version")) if cards else None
    )
    program = WSL_SMI if elsewhere == "WSL" and os.path.exists(WSL_SMI) else "nvidia-smi" if loaded else ""
    # A broken driver lets it hang.
    query = [
        "timeout",
        "60",
        program,
        f"--query-gpu={','.join(FIELDS.values())}",
        "--format=csv,noheader,nounits",
    ]
    code, printed = run(*query) if program else (0, "")
    smi = [] if code else smi_cards(printed)
    shape = "--showformat=${db:Status-Status}\t${Package}\t${Version}\t${Maintainer}\n"
    return {
        "cards": cards,
        "driver": loaded[1] if loaded else smi[0]["driver"] if smi else "",
        "smi": smi,
        "elsewhere": elsewhere,
        # dpkg-query fails where one pattern fits nothing, and answers for the others all the same.
        "machine": read_machine(run("dpkg-query", "--show", shape, *PACKAGES)[1])
        if cards and not elsewhere
        else {},
    }


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, ansible_facts={"gpu": read_gpus(module)})


if __name__ == "__main__":
    main()
