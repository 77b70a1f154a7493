"""The graphics cards of this machine, the driver that has them, and what decides whether another one may be installed.

Without a card this reads a few lines per PCI device and starts no program.
"""

from __future__ import annotations

import bisect
import glob
import os
import platform
import re

from ansible.module_utils.node_read import read_file, read_output
from ansible.module_utils.node_start import efi_variable, in_container, in_wsl

PCI = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
# Where Windows puts the program that knows its driver.
WSL_SMI = "/usr/lib/wsl/lib/nvidia-smi"
# Where each run of PCI device numbers begins (the PCI ID database, pci-ids.ucw.cz, October 2026).
GENERATION_FROM = [
    (0x0000, "Kepler"), (0x1340, "Maxwell"), (0x15C0, "Pascal"), (0x1600, "Maxwell"), (0x1720, "Pascal"),
    (0x1740, "Maxwell"), (0x1B00, "Pascal"), (0x1D80, "Volta"), (0x1E00, "Turing"), (0x2080, "Ampere"),
    (0x2180, "Turing"), (0x2200, "Ampere"), (0x2300, "Hopper"), (0x2400, "Ampere"), (0x2600, "Ada"),
    (0x2900, "Blackwell"),
]  # fmt: skip
# The lowest compute capability of each: what is known of a card before a driver has it.
CAPABILITY = {
    "Kepler": "3.0", "Maxwell": "5.0", "Pascal": "6.0", "Volta": "7.0", "Turing": "7.5", "Ampere": "8.0", "Ada": "8.9",
    "Hopper": "9.0", "Blackwell": "10.0",
}  # fmt: skip
# The key by which DKMS signs what it builds, on a node with Secure Boot.
MOK = "/var/lib/shim-signed/mok/MOK.der"
# The name comes last: it is the maker's text.
FIELDS = (
    "uuid pci.bus_id compute_cap memory.total display_active persistence_mode driver_version power.limit "
    "power.default_limit power.min_limit power.max_limit name"
).split()
# Everything of the driver's, the kernels that it must fit, and what a desktop looks like.
PACKAGES = (
    "linux-image-* linux-modules-nvidia-* linux-headers-* nvidia-* libnvidia-* cuda-drivers* "
    "xserver-xorg-video-nvidia* xserver-xorg-core gdm3 sddm lightdm casper"
).split()


def generation(device_id: str) -> str:
    """10de:2504 -> Ampere. A number that is higher than all known ones belongs to the newest."""
    number = int(device_id.rpartition(":")[2], 16)
    return GENERATION_FROM[bisect.bisect_right([first for first, _ in GENERATION_FROM], number) - 1][1]


def card_on_bus(place: str) -> dict[str, object]:
    device_id = f"10de:{read_file(f'{place}/device').removeprefix('0x')}"
    driver = f"{place}/driver"
    return {
        "pci": os.path.basename(place),
        "device_id": device_id,
        "generation": generation(device_id),
        "capability": CAPABILITY[generation(device_id)],
        "boot_vga": read_file(f"{place}/boot_vga") == "1",
        "bound": os.path.basename(os.path.realpath(driver)) if os.path.islink(driver) else "",
    }


def cards_on_bus() -> list[dict[str, object]]:
    """NVIDIA's graphics cards on the PCI bus: class 0x030000 (VGA) or 0x030200 (3D controller)."""
    return [
        card_on_bus(place)
        for place in sorted(glob.glob(f"{PCI}/*"))
        if read_file(f"{place}/vendor") == NVIDIA and read_file(f"{place}/class").startswith("0x03")
    ]


def has_switches() -> bool:
    """Whether NVIDIA's bridges are on the PCI bus (class 0x0680): the NVSwitches of a server with eight cards."""
    return any(
        read_file(f"{place}/vendor") == NVIDIA and read_file(f"{place}/class").startswith("0x0680")
        for place in glob.glob(f"{PCI}/*")
    )


def loaded_driver() -> str:
    """The version of the kernel module that is loaded now; empty when none is."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)*)\b", read_file("/proc/driver/nvidia/version"))
    return found[1] if found else ""


def number(text: str) -> float:
    """0 where the card does not say ("[N/A]")."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def ask_smi(program: str) -> list[dict[str, object]]:
    """What nvidia-smi says of each card; nothing where it fails, or hangs as a broken driver does."""
    query = f"--query-gpu={','.join(FIELDS)}"
    return smi_cards(read_output(program, query, "--format=csv,noheader,nounits", strict=True))


def smi_cards(answer: str) -> list[dict[str, object]]:
    """From `nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits`; a line of another shape is left out."""
    cards = []
    for line in answer.splitlines():
        values = line.strip().split(", ", len(FIELDS) - 1)
        if len(values) != len(FIELDS):
            continue
        of = {name: values[place] for place, name in enumerate(FIELDS)}  # Debian 11 has Python 3.9
        cards.append({
            "uuid": of["uuid"],
            "name": of["name"],
            # nvidia-smi writes the domain with eight digits, the kernel with four.
            "pci": re.sub(r"^0000(?=[0-9a-f]{4}:)", "", of["pci.bus_id"].lower()),
            "compute_capability": of["compute_cap"],
            "memory_mib": int(number(of["memory.total"])),
            "display_active": of["display_active"] == "Enabled",
            "persistence": of["persistence_mode"] == "Enabled",
            "driver": of["driver_version"],
            "power_limit": number(of["power.limit"]),
            "power_default": number(of["power.default_limit"]),
            "power_min": number(of["power.min_limit"]),
            "power_max": number(of["power.max_limit"]),
        })  # fmt: skip
    return cards


def read_packages() -> dict[str, dict[str, str]]:
    """The installed ones among PACKAGES: version, who made the package, and whether it shall stay as it is (`hold`)."""
    # dpkg-query fails when one of the patterns fits nothing, and answers for the others all the same.
    shape = "${Package}\t${Version}\t${db:Status-Status}\t${Maintainer}\t${db:Status-Want}\n"
    answer = read_output("dpkg-query", "--show", "--showformat", shape, *PACKAGES)
    rows = [line.split("\t") for line in answer.splitlines()]
    return {
        row[0]: {"version": row[1], "maintainer": row[3], "want": row[4]}
        for row in rows
        if len(row) == 5 and row[2] == "installed"
    }


def signing_key_enrolled() -> bool:
    """Whether the kernel accepts what DKMS has built here, with Secure Boot."""
    return "is already enrolled" in read_output("mokutil", "--test-key", MOK)


def installed(found: dict[str, dict[str, str]]) -> str:
    """The version of the driver that is installed, and so loaded after the next start; empty when there is none."""
    of_utils = (of for name, of in found.items() if re.fullmatch(r"nvidia-utils-\d+(-server)?", name))
    return next((match[0] for of in of_utils if (match := re.match(r"[\d.]+", of["version"]))), "")


def read_machine(cards: list[dict[str, object]]) -> dict[str, object]:
    """What the decision about the driver needs to know beside the cards."""
    secure, found = efi_variable("SecureBoot") == b"\x01", read_packages()  # as `mokutil --sb-state` says it
    return {
        "kernel": platform.release(),
        "packages": found,
        "installed": installed(found),
        # As `dkms status` says it: version/kernel. (That of a -server branch is nvidia-srv there.)
        "dkms": sorted(
            "/".join(path.split("/")[5:7]) for path in glob.glob("/var/lib/dkms/nvidia*/*/*/*/module")
        ),
        "run_file": os.path.exists("/usr/bin/nvidia-uninstall"),
        "switches": has_switches(),
        "nouveau": any(card["bound"] == "nouveau" for card in cards),
        "secure_boot": secure,
        "key_enrolled": secure and signing_key_enrolled(),
        "devices": all(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"))),
    }


def read_gpus() -> dict[str, object]:
    """The fact `gpu`: see modules/gpu_facts.py."""
    wsl, container = in_wsl(), in_container()
    cards = cards_on_bus()
    # A container sees the cards of its host. They are its own when it was given their devices.
    if container and not glob.glob("/dev/nvidia[0-9]*"):
        cards = []
    driver = loaded_driver() if cards else ""
    program = WSL_SMI if wsl and os.path.exists(WSL_SMI) else "nvidia-smi" if driver else ""
    smi = ask_smi(program) if program else []
    elsewhere = "WSL" if wsl else "container" if container else ""
    return {
        "cards": cards,
        "driver": driver or (str(smi[0]["driver"]) if smi else ""),
        "smi": smi,
        "elsewhere": elsewhere,
        "machine": read_machine(cards) if cards and not elsewhere else {},
    }
