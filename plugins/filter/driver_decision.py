"""Which driver a node's cards need, and whether it may be installed: from the fact `gpu` (modules/gpu_facts.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Gpu = Mapping[str, Any]  # the fact
Generations = Mapping[
    str, Mapping[str, Any]
]  # of the cards that can train: roles/nvidia_driver/vars/main.yml

# The packages that keep Ubuntu's kernels new: linux-image-generic, …-generic-hwe-22.04, …-oem-24.04c.
KERNEL = re.compile(r"linux-image-(([a-z]+)(?:-hwe)?(?:-\d\d\.\d\d[a-z]?)?(?:-edge)?)")
LEAVE = "Or leave its cards to yourself: nvidia_driver_enabled: false for this node in hosts.yml."


def version_key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def kernel_kind(machine: Mapping[str, Any]) -> str:
    """generic-hwe-22.04, say: of the running flavour the newest that is installed, else the newest of all."""
    flavour = re.sub(r".*\d-", "", machine["kernel"])
    kinds = {
        found[1]: (found[2] == flavour, version_key(version))
        for name, version in machine["packages"].items()
        # linux-image-virtual is the generic kernel, for virtual machines.
        if (found := KERNEL.fullmatch(name.replace("virtual", "generic")))
    }
    return max(kinds, key=lambda kind: kinds[kind]) if kinds else ""


def branch_of(machine: Mapping[str, Any]) -> str:
    """580-server, where the programs of that driver are installed."""
    found = (re.fullmatch(r"nvidia-utils-(\d+(?:-server)?)", name) for name in machine["packages"])
    return next((match[1] for match in found if match), "")


def branch_problem(branch: str, cards: Generations) -> str:
    """Why no driver of this branch does for these cards."""
    number = (version_key(branch) or [0])[0]
    for name, of in cards.items():
        if number < of["first"]:
            return f"{name} cards and torch need {of['first']} or later"
        if number > of.get("last", number):
            return f"{of['last']} is the last branch that knows {name} cards"
    return ""


def reason_to_install(machine: Mapping[str, Any], cards: Generations) -> str:
    """Why the driver that is installed does not do; "" where it does."""
    packages, branch = machine["packages"], branch_of(machine)
    if not branch:
        return "no driver is installed"
    here = f"driver {branch} is installed"
    if problem := branch_problem(branch, cards):
        return f"{here}, and {problem}"
    prebuilt = [name for name in packages if re.match(rf"linux-modules-nvidia-{branch}-(?!server)", name)]
    dkms = [name for name in packages if re.fullmatch(rf"nvidia-dkms-{branch}(-open)?", name)]
    is_open = any(f"-{branch}-open" in name for name in prebuilt + dkms)
    for name, of in cards.items():
        if prebuilt + dkms and ("open" if is_open else "proprietary") not in of["modules"]:
            kind = "open" if is_open else "proprietary"
            return f"{here} with {kind} modules, and {name} cards need the other kind"
    suffix = "-open" if is_open else ""
    if not dkms and f"linux-modules-nvidia-{branch}{suffix}-{kernel_kind(machine)}" not in packages:
        return f"{here} without the package that brings its modules with each kernel"
    # Without it no program gets a card: CUDA says that the system is not yet initialized.
    fabric = packages.get(f"nvidia-fabricmanager-{branch.partition('-')[0]}", "")
    if machine["switches"] and not fabric.startswith(machine["installed"]):
        return f"{here} without the nvidia-fabricmanager of its version, which NVSwitches need"
    return ""


def packages_to_install(machine: Mapping[str, Any], branch: str, modules: str) -> list[str]:
    """Canonical's signed modules and what belongs to them, and the kernel's own package: the two move together."""
    packages, kernel = machine["packages"], kernel_kind(machine)
    suffix = "-open" if modules == "open" else ""
    kinds = f"{kernel}|{kernel.replace('generic', 'virtual')}"
    desktop = {"xserver-xorg-core", "gdm3", "sddm", "lightdm"} & set(packages)
    return [
        f"linux-modules-nvidia-{branch}{suffix}-{kernel}",
        *(name for name in sorted(packages) if re.fullmatch(rf"linux-(headers|image)-({kinds})", name)),
        f"nvidia-driver-{branch}{suffix}" if desktop else f"nvidia-headless-no-dkms-{branch}{suffix}",
        f"nvidia-utils-{branch}",
        *([f"nvidia-fabricmanager-{branch.partition('-')[0]}"] if machine["switches"] else []),
    ]


def find_problem(gpu: Gpu, cards: Generations, modules: str, branch: str, distribution: str) -> str:
    """Why this role may not, or cannot, look after these cards; "" where it can."""
    machine = gpu["machine"]
    if not cards:
        return (
            "its NVIDIA card is a Kepler or older, which torch cannot use. Take it out, or say nvidia_driver_enabled: "
            "false and training_cards: none for this node in hosts.yml: it trains on its processor then."
        )
    if not modules:
        return f"no driver knows all of its cards ({' and '.join(cards)}). Put one of them into another node."
    if problem := branch_problem(branch, cards):
        return f"nvidia_driver_branch is {branch}, but {problem}. Correct it in settings.yml."
    if distribution != "Ubuntu":
        return f"it has an NVIDIA card and runs {distribution}; only Ubuntu's driver packages are known here. {LEAVE}"
    if machine["run_file"] or (gpu["driver"] and not machine["installed"] and not machine["foreign"]):
        return (
            "its driver comes from NVIDIA's .run file, which no package manager knows of. Take it away on the node "
            f"(sudo nvidia-uninstall), restart it and run this again. {LEAVE}"
        )
    if foreign := machine["foreign"]:
        return (
            f"its driver comes from another repository than Ubuntu's. Take it away there (sudo apt-get purge "
            f"{' '.join(foreign)}; then that repository's file below /etc/apt/sources.list.d), restart it and run this "
            f"again. {LEAVE}"
        )
    return ""


def dkms_problem(machine: Mapping[str, Any], built: bool) -> str:
    """Why a driver that DKMS builds is not loaded, where a restart alone would not load it either."""
    dkms = [name for name in machine["packages"] if name.startswith("nvidia-dkms-")]
    if not dkms or (built and not machine["secure_boot"]):
        return ""
    why = (
        "Secure Boot may refuse what was built there"
        if built
        else f"none fits its kernel, {machine['kernel']}"
    )
    return (
        f"driver {machine['installed']} is built on the node by DKMS and not loaded ({why}). Take that away (sudo "
        f"apt-get purge {' '.join(dkms)}) and run this again: modules that Canonical has signed take its place. (Whose "
        f"firmware knows the key restarts the node by hand.) {LEAVE}"
    )


def modules_problem(machine: Mapping[str, Any]) -> str:
    """Why no restart brings the driver's modules: there are none for this kernel, nor for a newer one."""
    kernel, branch = machine["kernel"], branch_of(machine)
    of_branch = re.compile(rf"linux-modules-nvidia-{branch}(-open)?-(\d+\.\d+\.\d+-.*|[a-z].*)")
    prebuilt = [found for name in machine["packages"] if (found := of_branch.fullmatch(name))]
    newer = any(version_key(one[2]) >= version_key(kernel) for one in prebuilt if one[2][0].isdecimal())
    if newer or any(name.startswith("nvidia-dkms-") for name in machine["packages"]):
        return ""
    suffix = "-open" if any(one[1] for one in prebuilt) else ""
    return (
        f"driver {machine['installed']} is installed, and has no modules for its kernel, {kernel}, nor for a newer one "
        f"(apt-mark showhold). Install linux-modules-nvidia-{branch}{suffix}-{kernel} there, and run this again. Where "
        f"apt has none: start an older kernel (in GRUB's menu), or wait some days for it. {LEAVE}"
    )


def power_problem(gpu: Gpu, limit: int) -> str:
    for card in gpu["smi"]:
        least, most = card["power_min"], card["power_max"]
        if limit and not least <= limit <= most:
            span = f"takes {least:.0f} to {most:.0f} W" if most else "takes no limit"
            return f"gpu_power_limit is {limit} W, but its {card['name']} {span}. Correct that in hosts.yml."
    return ""


def decide(
    gpu: Gpu, cards: Generations, branch: str, power_limit: int, distribution: str, live: bool
) -> dict[str, Any]:
    """See driver_decision; what this leaves out is as there."""
    machine, loaded = gpu["machine"], gpu["driver"]
    accepted = [of["modules"] for of in cards.values()]
    modules = next((kind for kind in ("open", "proprietary") if all(kind in of for of in accepted)), "")
    if problem := find_problem(gpu, cards, modules, branch, distribution):
        return {"problem": problem}
    why = reason_to_install(machine, cards)
    if live and (why or not gpu["smi"]):
        return {
            "problem": "it runs a live system (from a USB stick, say), which forgets a driver. Install Ubuntu on disk."
        }
    if why and not kernel_kind(machine):
        return {
            "problem": f"{why}, and no package of Ubuntu's keeps its kernel, {machine['kernel']}, new: there are no "
            f"signed modules for it. Install linux-image-generic, restart it and run this again. {LEAVE}"
        }
    if why:
        packages = packages_to_install(machine, branch, modules)
        command = f"sudo apt-get update && sudo apt-get install {' '.join(packages)}"
        driver = branch.partition("-")[0]
        return {"action": "install", "why": why, "packages": packages, "command": command, "driver": driver}
    if loaded == machine["installed"] and gpu["smi"]:
        ready = machine["devices"] and all(
            card["persistence"] and power_limit in (0, card["power_limit"]) for card in gpu["smi"]
        )
        return {"driver": loaded, "problem": power_problem(gpu, power_limit), "ready": ready}
    prebuilt = [name for name in machine["packages"] if name.startswith("linux-modules-nvidia-")]
    built = machine["kernel"] in machine["dkms"] or any(name.endswith(machine["kernel"]) for name in prebuilt)
    if not loaded and not machine["nouveau"] and (problem := dkms_problem(machine, built)):
        return {"problem": problem}
    if not loaded and (problem := modules_problem(machine)):
        return {"problem": problem}
    silent = ", but nvidia-smi gives no answer" if loaded == machine["installed"] else ""
    why = f"driver {machine['installed']} is installed, and {loaded or 'none'} is loaded{silent}"
    loads = built and not loaded and not machine["nouveau"]
    return {"action": "load" if loads else "restart", "why": why, "driver": machine["installed"]}


def driver_decision(
    gpu: Gpu,
    runs: list[str],
    branch: str,
    generations: Generations,
    enabled: bool = True,
    power_limit: int = 0,
    distribution: str = "Ubuntu",
    live: bool = False,
) -> dict[str, Any]:
    """What to do about the driver of a node.

    runs: the units of a run that are active. branch: what is installed where none fits. power_limit: watts, 0 for none.
    The answer has
    ours: whether there are cards to look after;
    action: `none`, `install` (of packages; command: what a person would type for it; a restart may follow), `load` (the
    modules are there) or `restart`; why: the reason; ready: whether the cards are as ranks need them;
    driver: the version that runs when that is done (of what is to be installed: the branch);
    problem: a sentence where nothing of this can be done; runs: as given.
    """
    answer: dict[str, Any] = {
        "action": "none", "why": "", "problem": "", "packages": [], "command": "", "driver": "", "ready": False,
        "ours": bool(enabled and gpu["cards"] and not gpu["elsewhere"]), "runs": runs,
    }  # fmt: skip
    if not answer["ours"]:
        return answer
    # A card that is too old beside one that can train is nobody's business.
    found = [card["generation"] for card in gpu["cards"] if card["generation"] in generations]
    answer |= decide(
        gpu, {name: generations[name] for name in found}, branch, int(power_limit), distribution, live
    )
    if answer["action"] == "install" and runs:
        answer["problem"] = (
            f"a run is active there, and its driver cannot be changed under it ({answer['why']}). End the run first: "
            "ansible-playbook playbooks/stop.yml."
        )
    return answer


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"driver_decision": driver_decision}
