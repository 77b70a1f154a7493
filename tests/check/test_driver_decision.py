"""What the role nvidia_driver decides: each row of the table in its README, from recorded facts (gpu_records.yml)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import tree
import yaml

ROLE = tree.ROOT / "roles/nvidia_driver"
RECORDS = yaml.safe_load((tree.ROOT / "tests/check/gpu_records.yml").read_text(encoding="utf-8"))
MAKERS = {
    "ubuntu": "Ubuntu Developers <ubuntu-devel-discuss@lists.ubuntu.com>",
    "nvidia": "NVIDIA Corporation <cudatools@nvidia.com>",
}
DECISION = tree.plugin("filter/driver_decision")
GPU = tree.plugin("module_utils/node_gpu")


def cards(name: str) -> list[dict[str, Any]]:
    """NVIDIA's cards among the lines of `lspci -nn`, as gpu_facts reads them."""
    found: list[dict[str, Any]] = []
    for line in RECORDS["cards"][name]["lspci"]:
        match = re.match(r"(\S+) .*?\[(\w{4})\]: .*\[(10de:\w{4})\]", line)
        if match and match[2].startswith("03"):
            found.append({
                "pci": f"0000:{match[1]}", "device_id": match[3], "boot_vga": not found, "bound": "",
                "generation": GPU.generation(match[3]), "capability": GPU.CAPABILITY[GPU.generation(match[3])],
            })  # fmt: skip
    return found


def seen(card: str, machine: str, distribution: str = "Ubuntu", **more: Any) -> dict[str, Any]:
    """The facts of a recorded node, and which runs are active. `more`: what nvidia-smi says of each card."""
    record, on_bus = RECORDS["machines"][machine], cards(card)
    names = ("secure_boot", "key_enrolled", "nouveau", "run_file")
    flags = {name: record.get(name, False) for name in names}
    packages = {
        name: {"version": str(version), "maintainer": maker}
        for of, maker in MAKERS.items()
        for name, version in record.get(of, {}).items()
    }
    smi = {
        "name": "NVIDIA GeForce RTX 3060", "power_min": 100.0, "power_max": 212.0, "power_limit": 170.0,
        "persistence": True, "display_active": False, **more,
    }  # fmt: skip
    answers = record.get("loaded") and not record.get("silent")
    gpu = {
        "cards": on_bus,
        "driver": record.get("loaded", ""),
        "smi": [
            {**smi, "pci": card["pci"], "uuid": f"GPU-{number}", "compute_capability": card["capability"]}
            for number, card in enumerate(on_bus)
        ] if answers else [],
        "elsewhere": "",
        "machine": {
            "kernel": record["kernel"], "packages": packages, "dkms": record.get("dkms", []),
            "switches": any("[0680]" in line for line in RECORDS["cards"][card]["lspci"]),
            "devices": True, "installed": GPU.installed(packages), **flags,
        },
    }  # fmt: skip
    return {
        "gpu": gpu, "distribution": distribution, "boot": {"live": record.get("live", False)}, "runs": [],
    }  # fmt: skip


def decide(node: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """As roles/nvidia_driver/tasks/decide.yml does it."""
    told = {
        "branch": "580-server",
        "distribution": node["distribution"],
        "live": node["boot"]["live"],
        **settings,
    }
    return DECISION.driver_decision(node["gpu"], node["runs"], **told)


@dataclass(frozen=True)
class Row:
    """says: a regular expression for the sentence when the node is refused, for the reason otherwise."""

    card: str
    machine: str
    action: str
    says: str = ""
    packages: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    distribution: str = "Ubuntu"


SERVER = "linux-modules-nvidia-580-server-open-generic linux-headers-generic linux-image-generic"
HEADLESS = "nvidia-headless-no-dkms-580-server-open nvidia-utils-580-server"
HWE = "linux-modules-nvidia-580-server-open-generic-hwe-22.04 linux-image-generic-hwe-22.04"
OEM = "linux-modules-nvidia-580-server-open-oem-24.04c linux-image-oem-24.04c"
PROPRIETARY = (
    "linux-modules-nvidia-580-server-generic linux-image-generic nvidia-headless-no-dkms-580-server "
    "nvidia-utils-580-server"
)
OLD = (
    "linux-modules-nvidia-580-server-generic linux-headers-generic linux-image-generic "
    "nvidia-headless-no-dkms-580-server nvidia-utils-580-server"
)
# The name is what the README's table has in its first column.
ROWS = {
    "no NVIDIA card": Row("none", "server", "none"),
    "Ampere, no driver": Row("rtx3060", "server", "install", "no driver is installed", f"{SERVER} {HEADLESS}"),
    "Secure Boot, no driver": Row("rtx3060", "secure_boot", "install", "no driver", f"{SERVER} {HEADLESS}"),
    "the HWE kernel": Row("rtx_a2000", "server_hwe", "install", "no driver", f"{HWE} {HEADLESS}"),
    "a virtual machine's kernel": Row(
        "rtx3060", "virtual_machine", "install", "no driver",
        f"linux-modules-nvidia-580-server-open-generic linux-image-virtual {HEADLESS}",
    ),
    "a desktop, nouveau has the card": Row(
        "rtx3060", "desktop_with_nouveau", "install", "no driver",
        f"{HWE} nvidia-driver-580-server-open nvidia-utils-580-server",
    ),
    "Pascal": Row("gtx1060", "server", "install", "no driver", OLD),
    "Maxwell": Row("gtx980m", "server", "install", "no driver", OLD),
    "a card whose name nobody knows": Row("gtx970_without_name", "server", "install", "no driver", OLD),
    "Pascal beside Ampere": Row("gtx1060_and_rtx3060", "server", "install", "no driver", OLD),
    "Volta with NVSwitch": Row(
        "v100_and_nvswitch", "server", "install", "no driver", f"{OLD} nvidia-fabricmanager-580"
    ),
    "Blackwell": Row("rtx5090", "server", "install", "no driver", f"{SERVER} {HEADLESS}"),
    "a card newer than all that are known": Row(
        "a_card_to_come", "server", "install", "no driver", f"{SERVER} {HEADLESS}"
    ),
    "a Fermi beside Ampere": Row("gtx560ti_and_rtx3060", "server", "install", "no driver", f"{SERVER} {HEADLESS}"),
    "Ubuntu's driver fits and is loaded": Row("rtx3060", "ubuntu_580_server", "none"),
    "Ubuntu's driver, built by DKMS, fits and is loaded": Row("gtx1060", "dkms", "none"),
    "an OEM kernel": Row("rtx3060", "oem", "install", "no driver", f"{OEM} {HEADLESS}"),
    "an OEM kernel beside a newer generic one": Row(
        "rtx3060", "oem_beside_generic", "install", "no driver", f"{OEM} {HEADLESS}"
    ),
    "Ubuntu's driver fits NVSwitch": Row("v100_and_nvswitch", "ubuntu_580_proprietary_fabric", "none"),
    "Ubuntu's driver is too old": Row(
        "rtx3060", "ubuntu_450", "install", "driver 450-server is installed, and Ampere cards and torch need 535",
        f"{SERVER} {HEADLESS}",
    ),
    "Ubuntu's driver is too old for Blackwell and torch": Row(
        "rtx5090", "ubuntu_570_open", "install", "Blackwell cards and torch need 580", f"{HWE} {HEADLESS}"
    ),
    "Ubuntu's driver no longer knows the card": Row(
        "gtx1060", "ubuntu_595", "install", "580 is the last branch that knows Pascal", PROPRIETARY
    ),
    "Blackwell, proprietary modules": Row(
        "rtx5090", "ubuntu_580_proprietary", "install", "with proprietary modules, and Blackwell cards need the other",
        f"linux-modules-nvidia-580-server-open-generic linux-image-generic {HEADLESS}",
    ),
    "Pascal, open modules": Row(
        "gtx1060", "ubuntu_580_server", "install", "with open modules, and Pascal cards need the other", PROPRIETARY
    ),
    "modules for one kernel only": Row(
        "rtx3060", "ubuntu_one_kernel_only", "install", "without the package that brings its modules with each kernel",
        f"{SERVER} {HEADLESS}",
    ),
    "NVSwitch without the fabricmanager": Row(
        "v100_and_nvswitch", "ubuntu_580_proprietary", "install", "without the nvidia-fabricmanager of its version",
        f"{PROPRIETARY} nvidia-fabricmanager-580",
    ),
    "installed, not loaded": Row("rtx3060", "ubuntu_580_not_loaded", "load", "580.178.04 is installed, and none is"),
    "built by DKMS, not loaded": Row("gtx1060", "dkms_not_loaded", "load", "none is loaded"),
    "installed, and the kernel is older": Row("rtx3060", "ubuntu_580_old_kernel", "restart", "none is loaded"),
    "installed, and nouveau has the card": Row("rtx3060", "ubuntu_580_nouveau", "restart", "none is loaded"),
    "installed, and another version is loaded": Row(
        "rtx3060", "ubuntu_580_other_loaded", "restart", "580.178.04 is installed, and 580.159.04 is",
    ),
    "loaded, and nvidia-smi is silent": Row("rtx3060", "ubuntu_580_silent", "restart", "nvidia-smi gives no answer"),
    "built by DKMS, but not for this kernel nor for a newer one": Row(
        "gtx1060", "dkms_failed", "refused", "no modules for its kernel, 6.2.0-39-generic, .*purge nvidia-dkms-535",
    ),
    "Secure Boot, built by DKMS, another version is loaded": Row(
        "gtx1060", "dkms_and_secure_boot_loaded", "restart", "535.113.01 is installed, and 535.86.05 is loaded",
    ),
    "Secure Boot, built by DKMS, and its key is enrolled": Row(
        "gtx1060", "dkms_and_secure_boot_enrolled", "load", "none is loaded"
    ),
    "Debian": Row("rtx3060", "server", "refused", "runs Debian; only Ubuntu's", distribution="Debian"),
    "Kepler and older": Row(
        "gtx560ti", "server", "refused", r"10de:1200\) is a Kepler or older.*enabled: false and training_cards: none"
    ),
    "Pascal beside Blackwell": Row(
        "gtx1060_and_rtx5090", "server", "refused", "no driver knows all of its cards: Pascal and Blackwell need"
    ),
    "a branch that does not know the card": Row(
        "gtx1060", "server", "refused", "branch is 595-server, but 580 is the last", settings={"branch": "595-server"}
    ),
    "a branch that is too old": Row(
        "rtx3060", "server", "refused", "branch is 470, but Ampere cards and torch need 535", settings={"branch": "470"}
    ),
    "a branch that is none": Row(
        "rtx3060", "server", "refused", "branch is '580.178.04'; it is a number", settings={"branch": "580.178.04"}
    ),
    "NVSwitch and a branch without -server": Row(
        "v100_and_nvswitch", "server", "refused", "Say 580-server", settings={"branch": "580"}
    ),
    "Secure Boot, and the driver is built by DKMS": Row(
        "gtx1060", "dkms_and_secure_boot", "refused",
        "Secure Boot is on.*apt-get purge nvidia-dkms-535.*mokutil --import",
    ),
    "a driver of a .run file": Row("rtx3060", "run_file", "refused", "NVIDIA's .run file.*sudo nvidia-uninstall"),
    "a driver of no package": Row("rtx3060", "run_file_without_its_uninstaller", "refused", "NVIDIA's .run file"),
    "NVIDIA's own repository": Row(
        "rtx3060", "cuda_repository", "refused",
        "another repository.*purge cuda-drivers-550 nvidia-driver-550 nvidia-utils-550;",
    ),
    "the PPA graphics-drivers": Row("rtx3060", "ppa", "refused", r"another repository.*\(nvidia-driver-550, "),
    "a kernel that is not Ubuntu's": Row("rtx3060", "other_kernel", "refused", "its kernel, 6.12.9-custom, is none"),
    "a live system": Row("rtx3060", "live", "refused", "live system"),
    "a power limit that the card does not take": Row(
        "rtx3060", "ubuntu_580_server", "refused", "is 300 W, but its NVIDIA GeForce RTX 3060 takes 100 to 212 W",
        settings={"power_limit": 300},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
def test_what_is_decided(row: Row) -> None:
    node = seen(row.card, row.machine, row.distribution)
    answer = decide(node, **row.settings)
    assert ("refused" if answer["problem"] else answer["action"]) == row.action, answer
    if row.says:
        assert re.search(row.says, answer["problem"] or answer["why"], re.DOTALL), answer
    if row.action != "refused":
        assert answer["packages"] == row.packages.split()


@pytest.mark.parametrize(("branch", "is_refused"), [("580-server", True), ("450-server", False)])
def test_a_driver_that_is_held_is_not_replaced(branch: str, is_refused: bool) -> None:
    node = seen("rtx3060", "ubuntu_450")
    node["gpu"]["machine"]["packages"]["nvidia-utils-450-server"]["want"] = "hold"
    problem = decide(node, branch=branch)["problem"]
    assert ("sudo apt-mark unhold nvidia-utils-450-server)" in problem) == is_refused, problem


@pytest.mark.parametrize(
    ("card", "machine", "version"),
    [
        ("rtx3060", "desktop_with_nouveau", "580"),
        ("rtx3060", "ubuntu_450", "580"),
        ("rtx3060", "ubuntu_580_nouveau", "580.178.04"),
        ("gtx1060", "dkms", "535.113.01"),
        ("none", "server", ""),
    ],
)
def test_it_is_known_which_driver_will_run(card: str, machine: str, version: str) -> None:
    """Torch is chosen by it, and comes before the restart."""
    node = seen(card, machine)
    assert decide(node)["driver"] == version


@pytest.mark.parametrize(
    ("changes", "limit", "ready"),
    [({}, 0, True), ({}, 170, True), ({}, 150, False), ({"persistence": False}, 0, False)],
)
def test_cards_are_ready_as_their_unit_makes_them(changes: dict[str, Any], limit: int, ready: bool) -> None:
    node = seen("rtx3060", "ubuntu_580_server", **changes)
    decided = decide(node, power_limit=limit)
    assert (decided["action"], decided["ready"]) == ("none", ready)
    node["gpu"]["machine"]["devices"] = False
    assert not decide(node)["ready"]


def test_every_decision_is_in_the_table_of_the_readme() -> None:
    readme = (ROLE / "README.md").read_text(encoding="utf-8")
    table = readme.split("<!-- decisions -->")[1].split("<!-- /decisions -->")[0]
    told = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[2:]
    assert told == list(ROWS)


def test_every_record_says_where_it_was_seen_and_is_used() -> None:
    for kind in ("cards", "machines"):
        for name, record in RECORDS[kind].items():
            assert record["source"], name
        used = {getattr(row, kind.removesuffix("s")) for row in ROWS.values()}
        assert used == set(RECORDS[kind])


@pytest.mark.parametrize("unit", ["aura-train@0.service", "aura-script.service"])
def test_nothing_is_installed_under_a_run(unit: str) -> None:
    node = seen("rtx3060", "ubuntu_450")
    node["runs"] = [unit]
    assert "a run is active there" in decide(node)["problem"]


@pytest.mark.parametrize("elsewhere", ["WSL", "container"])
def test_where_the_driver_is_another_systems_nothing_is_done(elsewhere: str) -> None:
    node = seen("rtx3060", "server")
    node["gpu"] |= {"elsewhere": elsewhere, "machine": {}}
    assert decide(node)["action"] == "none"


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
