"""What the role nvidia_driver decides: a table of nodes.

Names and versions of packages are those of Ubuntu 22.04's archive (22 November 2026). The nodes are synthetic.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import tree
import yaml

DECISION = tree.plugin("filter/driver_decision")
GPU = tree.plugin("modules/gpu_facts")
ROLE = yaml.safe_load((tree.ROOT / "roles/nvidia_driver/vars/main.yml").read_text(encoding="utf-8"))
PCI = {
    "Fermi": "1200", "GTX 980M": "1617", "GTX 1060": "1c03", "V100": "1db1", "RTX 3060": "2503", "RTX 5090": "2b85",
    "to come": "3f00",
}  # fmt: skip
GENERIC = "linux-image-generic=5.15.0.204.176 linux-image-5.15.0-204-generic=5.15.0-204.214"
HEADERS = "linux-headers-generic=5.15.0.204.176"
HWE = "linux-image-generic=5.15.0.204.172 linux-image-generic-hwe-22.04=6.8.0-138.138~22.04.1"
OEM = "linux-image-generic-hwe-24.04=6.17.0-20.20 linux-image-oem-24.04c=6.14.0-1012.12 linux-image-oem-24.04=6.8"


def prebuilt(branch: str = "580-server-open", version: str = "580.178.04") -> str:
    """What the role installs, on the generic kernel 5.15.0-204."""
    utils = f"nvidia-utils-{branch.removesuffix('-open')}={version}-0ubuntu0.22.04.1"
    return (
        f"{GENERIC} linux-modules-nvidia-{branch}-generic=1 linux-modules-nvidia-{branch}-5.15.0-204-generic=1 "
        + utils
    )


DKMS = f"{GENERIC} nvidia-utils-535=535.113.01-0ubuntu0.22.04.1 nvidia-dkms-535=535.113.01-0ubuntu0.22.04.1"


def seen(
    *names: str, packages: str = GENERIC, loaded: str = "", smi: bool = True, **machine: Any
) -> dict[str, Any]:
    """The fact gpu of a node with these cards, and what test_restarts.py wants beside it."""
    cards = [
        {"pci": f"0000:0{place}:00.0", "device_id": f"10de:{PCI[name]}", "generation": GPU.generation(PCI[name]),
         "capability": GPU.CAPABILITY[GPU.generation(PCI[name])], "boot_vga": not place, "bound": ""}
        for place, name in enumerate(names)
    ]  # fmt: skip
    maker = machine.pop("maker", "Ubuntu Developers")
    listing = "".join(
        f"installed\t{name}\t{version}\t{maker}\n"
        for name, version in (one.split("=") for one in packages.split())
    )
    known = {
        "name": "NVIDIA GeForce RTX 3060", "power_min": 100.0, "power_max": 212.0, "power_limit": 170.0,
        "persistence": machine.pop("persistence", True), "display_active": False,
    }  # fmt: skip
    own = GPU.read_machine(listing) | {
        "kernel": "5.15.0-204-generic", "dkms": [], "run_file": False, "switches": False, "nouveau": False,
        "secure_boot": False, "devices": True, **machine,
    }  # fmt: skip
    answers = (
        [
            known
            | {"pci": card["pci"], "uuid": f"GPU-{card['pci']}", "compute_capability": card["capability"]}
            for card in cards
        ]
        if loaded and smi
        else []
    )
    gpu = {"cards": cards, "driver": loaded, "smi": answers, "elsewhere": "", "machine": own}
    return {"gpu": gpu, "distribution": "Ubuntu", "runs": []}


def decide(node: dict[str, Any], runs: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """As roles/nvidia_driver/tasks/decide.yml does it."""
    generations = ROLE["__nvidia_driver_generations"]
    told = {"branch": "580-server", "generations": generations, **settings}
    return DECISION.driver_decision(node["gpu"], list(runs), **told)


AMPERE, PASCAL = ["RTX 3060"], ["GTX 1060"]
UP: dict[str, Any] = {"packages": prebuilt(), "loaded": "580.178.04"}
FABRIC: dict[str, Any] = {"packages": prebuilt("580-server"), "loaded": "580.178.04", "switches": True}
NEW = "linux-modules-nvidia-580-server-open-generic linux-image-generic nvidia-headless-no-dkms-580-server-open "
NEW += "nvidia-utils-580-server"
OLD = NEW.replace("-open", "")


# Name: card, what is so on the node, settings, what is done, and how the sentence or the packages look.
@pytest.mark.parametrize(
    ("cards", "of", "told", "action", "words"),
    [
        pytest.param([], {}, {}, "none", "", id="no NVIDIA card"),
        pytest.param(AMPERE, {}, {}, "install", f"no driver is installed {NEW}$", id="Ampere, no driver"),
        pytest.param(AMPERE, {"packages": f"{GENERIC} {HEADERS}"}, {}, "install", "linux-headers-generic",
                     id="with the kernel's headers"),
        pytest.param(AMPERE, {"packages": HWE, "kernel": "6.8.0-138-generic"}, {}, "install",
                     "open-generic-hwe-22.04 linux-image-generic-hwe-22.04 nvidia-headless", id="the HWE kernel"),
        pytest.param(AMPERE, {"packages": f"{GENERIC} gdm3=42.0", "nouveau": True}, {}, "install",
                     "generic nvidia-driver-580-server-open nvidia-utils", id="a desktop, nouveau has the card"),
        pytest.param(AMPERE, {"packages": OEM, "kernel": "6.14.0-1012-oem"}, {}, "install",
                     "-open-oem-24.04c linux-image-oem-24.04c", id="an OEM kernel"),
        pytest.param(PASCAL, {}, {}, "install", OLD, id="Pascal: proprietary modules of the last branch"),
        pytest.param(["GTX 980M"], {}, {}, "install", OLD, id="Maxwell"),
        pytest.param(AMPERE, {"packages": "linux-image-virtual=5.15.0.204.176"}, {}, "install",
                     NEW.replace("linux-image-generic", "linux-image-virtual"), id="a virtual machine's kernel"),
        pytest.param(["GTX 1060", "RTX 3060"], {}, {}, "install", OLD, id="Pascal beside Ampere"),
        pytest.param(["V100"] * 2, {"switches": True}, {}, "install", f"{OLD} nvidia-fabricmanager-580", id="NVSwitch"),
        pytest.param(["RTX 5090"], {}, {}, "install", NEW, id="Blackwell"),
        pytest.param(["to come"], {}, {}, "install", NEW, id="a card newer than all that are known"),
        pytest.param(["Fermi", "RTX 3060"], {}, {}, "install", NEW, id="one that torch cannot use beside Ampere"),
        pytest.param(AMPERE, UP, {}, "none", "", id="Ubuntu's driver fits and is loaded"),
        pytest.param(PASCAL, {"packages": DKMS, "loaded": "535.113.01"}, {}, "none", "", id="built by DKMS, loaded"),
        pytest.param(["V100"], FABRIC | {"packages": f"{FABRIC['packages']} nvidia-fabricmanager-580=580.178.04-0"},
                     {}, "none", "", id="NVSwitch with its fabricmanager"),
        pytest.param(["V100"], FABRIC, {}, "install", "without the nvidia-fabricmanager", id="NVSwitch without it"),
        pytest.param(AMPERE, {"packages": prebuilt("450-server", "450.80.02")}, {}, "install",
                     "driver 450-server is installed, and Ampere cards and torch need 535", id="too old"),
        pytest.param(["RTX 5090"], {"packages": prebuilt("570-open", "570.211.01")}, {}, "install",
                     "Blackwell cards and torch need 580", id="too old for Blackwell and torch"),
        pytest.param(PASCAL, {"packages": prebuilt("595", "595.58.03")}, {}, "install",
                     "580 is the last branch that knows Pascal", id="it no longer knows the card"),
        pytest.param(["RTX 5090"], UP | {"packages": prebuilt("580-server")}, {}, "install",
                     "with proprietary modules, and Blackwell cards", id="Blackwell, proprietary modules"),
        pytest.param(PASCAL, UP, {}, "install", "with open modules, and Pascal", id="Pascal, open modules"),
        pytest.param(AMPERE, UP | {"packages": prebuilt().replace("server-open-generic=", "x=")}, {}, "install",
                     "without the package that brings its modules", id="modules for one kernel only"),
        pytest.param(AMPERE, {"packages": prebuilt()}, {}, "load", "none is loaded", id="installed, not loaded"),
        pytest.param(AMPERE, {"packages": prebuilt(), "kernel": "5.15.0-198-generic"}, {}, "restart",
                     "none is loaded", id="installed, and the kernel is older"),
        pytest.param(AMPERE, {"packages": prebuilt(), "kernel": "5.15.0-205-generic"}, {}, "refused",
                     "no modules for its kernel, 5.15.0-205-generic.* linux-modules-nvidia-580-server-open-5.15.0-205-",
                     id="installed, and the kernel is newer than all modules"),
        pytest.param(AMPERE, {"packages": prebuilt(), "nouveau": True}, {}, "restart", "580.178.04 is installed",
                     id="installed, and nouveau has the card"),
        pytest.param(AMPERE, UP | {"loaded": "580.159.04"}, {}, "restart", "580.159.04 is loaded",
                     id="another version is loaded"),
        pytest.param(AMPERE, UP | {"smi": False}, {}, "restart", "gives no answer", id="nvidia-smi is silent"),
        pytest.param(PASCAL, {"packages": DKMS, "dkms": ["5.15.0-204-generic"]}, {}, "load", "none is loaded",
                     id="built by DKMS, not loaded"),
        pytest.param(PASCAL, {"packages": DKMS, "dkms": ["5.15.0-198-generic"]}, {}, "refused",
                     "none fits its kernel, 5.15.0-204-generic.*purge nvidia-dkms-535", id="DKMS failed"),
        pytest.param(PASCAL, {"packages": DKMS, "dkms": ["5.15.0-204-generic"], "secure_boot": True}, {}, "refused",
                     "Secure Boot.*purge nvidia-dkms-535", id="DKMS under Secure Boot"),
        pytest.param(AMPERE, {}, {"distribution": "Debian"}, "refused", "runs Debian; only Ubuntu's", id="Debian"),
        pytest.param(["Fermi"], {}, {}, "refused", "Kepler or older.*training_cards: none", id="Kepler and older"),
        pytest.param(["GTX 1060", "RTX 5090"], {}, {}, "refused", "no driver knows all.*Pascal and", id="both"),
        pytest.param(PASCAL, {}, {"branch": "595"}, "refused", "but 580 is the last", id="a branch too new"),
        pytest.param(AMPERE, {}, {"branch": "470"}, "refused", "branch is 470, but Ampere", id="a branch too old"),
        pytest.param(AMPERE, {"loaded": "550.54.14", "run_file": True}, {}, "refused", ".run file", id=".run file"),
        pytest.param(AMPERE, {"loaded": "550.54.14"}, {}, "refused", ".run file", id="a driver of no package"),
        pytest.param(AMPERE, UP | {"maker": "NVIDIA <cudatools@nvidia.com>"}, {}, "refused",
                     "another repository.*purge linux-modules.*nvidia-utils-580-server;", id="NVIDIA's repository"),
        pytest.param(AMPERE, {"packages": f"{GENERIC} nvidia-utils-550=550.120-0ubuntu0~gpu22.04.1"}, {}, "refused",
                     "purge nvidia-utils-550;", id="the PPA graphics-drivers"),
        pytest.param(AMPERE, {"packages": "linux-image-6.12.9-custom=1", "kernel": "6.12.9-custom"}, {}, "refused",
                     "its kernel, 6.12.9-custom", id="a kernel that is not Ubuntu's"),
        pytest.param(AMPERE, UP, {"power_limit": 300}, "refused", "300 W, but its NVIDIA.* takes 100 to 212 W",
                     id="a power limit that the card does not take"),
        pytest.param(AMPERE, {}, {"live": True}, "refused", "live system", id="a live system"),
        pytest.param(AMPERE, {}, {"runs": ("aura-script.service",)}, "refused", "a run is active there", id="a run"),
        pytest.param(AMPERE, UP, {"runs": ("aura-train@0.service",)}, "none", "", id="a run, and nothing to do"),
        pytest.param(AMPERE, {}, {"enabled": False}, "none", "", id="left to its owner"),
    ],
)  # fmt: skip
def test_what_is_decided(cards: list[str], of: Any, told: Any, action: str, words: str) -> None:
    answer = decide(seen(*cards, **of), **told)
    assert ("refused" if answer["problem"] else answer["action"]) == action, answer
    said = answer["problem"] or f"{answer['why']} {' '.join(answer['packages'])}"
    assert re.search(words, said, re.DOTALL), answer


@pytest.mark.parametrize(
    ("of", "version"),
    [({}, "580"), (UP, "580.178.04"), ({"packages": prebuilt(), "nouveau": True}, "580.178.04")],
)
def test_the_driver_that_will_run_is_named(of: Any, version: str) -> None:
    """Torch is chosen by it, and comes before the restart."""
    assert decide(seen("RTX 3060", **of))["driver"] == version


@pytest.mark.parametrize(
    ("of", "limit", "ready"),
    [
        ({}, 0, True),
        ({}, 170, True),
        ({}, 150, False),
        ({"persistence": False}, 0, False),
        ({"devices": False}, 0, False),
    ],
)
def test_cards_are_ready_as_their_unit_makes_them(of: dict[str, Any], limit: int, ready: bool) -> None:
    decided = decide(seen("RTX 3060", **UP, **of), power_limit=limit)
    assert (decided["action"], decided["ready"]) == ("none", ready)


@pytest.mark.parametrize("elsewhere", ["WSL", "container"])
def test_where_the_driver_is_another_systems_nothing_is_done(elsewhere: str) -> None:
    node = seen("RTX 3060")
    node["gpu"] |= {"elsewhere": elsewhere, "machine": {}}
    assert decide(node)["action"] == "none"
