"""Which driver a node's cards need, and whether it may be installed: from the fact `gpu` (modules/gpu_facts.py)."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

Gpu = dict[str, Any]  # the fact
Packages = dict[str, dict[str, str]]  # by name: version, maintainer, want


class Generation(NamedTuple):
    """first, last: the branches that serve (0: no end yet). kinds: of kernel modules."""

    first: int
    last: int = 0
    kinds: tuple[str, ...] = ("open", "proprietary")


# 535 is the least that the guides accept. Blackwell knows 570, but torch 2.13 has a build for it only with CUDA 13,
# which needs 580.
GENERATIONS = {
    "Maxwell": Generation(535, 580, ("proprietary",)),
    "Pascal": Generation(535, 580, ("proprietary",)),
    "Volta": Generation(535, 580, ("proprietary",)),
    "Turing": Generation(535),
    "Ampere": Generation(535),
    "Hopper": Generation(535),
    "Ada": Generation(535),
    "Blackwell": Generation(580, kinds=("open",)),  # and what came after it
}
TOO_OLD = "Kepler"  # and all before it: torch has no build for them

DRIVER = re.compile(
    r"(nvidia-(driver|headless|utils|compute-utils|kernel-common|kernel-source|dkms|open)|libnvidia-compute"
    r"|linux-modules-nvidia|cuda-drivers)\b"
)
MODULES = re.compile(r"linux-modules-nvidia-(?P<branch>\d+(?:-server)?)(?P<open>-open)?-(?P<kernel>.*)")
DKMS = re.compile(r"nvidia-dkms-(?P<branch>\d+(?:-server)?)(?P<open>-open)?")
UTILS = re.compile(r"nvidia-utils-(?P<branch>\d+(?:-server)?)")
# The packages that keep Ubuntu's kernels new, by the kernel's kind: generic-hwe-22.04 and oem-24.04c are two.
KERNEL = re.compile(
    r"linux-image-(?!extra)(?P<kind>(?P<flavour>[a-z][a-z-]*?)(?:-hwe)?(?:-\d\d\.\d\d[a-z]?)?(?:-edge)?)"
)
LEAVE = "Or leave everything about its cards to yourself: nvidia_driver_enabled: false for this node in hosts.yml."


class Driver(NamedTuple):
    """The driver that the packages of a node make up; kernels: those for which there are modules."""

    branch: str = ""  # 580-server
    version: str = ""  # 580.95.05
    kind: str = ""  # of its modules: open, proprietary
    dkms: bool = False  # built on the node
    follows: bool = False  # a package brings the modules of each new kernel
    kernels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()  # those that are not Ubuntu's

    @property
    def suffix(self) -> str:
        return "-open" if self.kind == "open" else ""


class Node(NamedTuple):
    gpu: Gpu
    generations: list[str]  # of the cards that can train
    driver: Driver
    kernel: str  # the kind: generic-hwe-22.04
    branch: str  # to install where no driver fits
    power_limit: int  # [W], 0 for none
    distribution: str
    live: bool  # the system forgets what was installed

    @property
    def machine(self) -> dict[str, Any]:
        return self.gpu["machine"]


def version_key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def is_ubuntus(package: dict[str, str]) -> bool:
    """Whether Ubuntu's own archive made it, and not NVIDIA's repository or a PPA (graphics-drivers writes ~gpu)."""
    maker = re.search(r"ubuntu|canonical", package["maintainer"], re.IGNORECASE)
    return bool(maker) and "~gpu" not in package["version"]


def find_driver(machine: dict[str, Any], kernel: str) -> Driver:
    """kernel: the kind whose modules have to follow it."""
    packages: Packages = machine["packages"]
    names = tuple(sorted(name for name in packages if DRIVER.match(name)))
    foreign = tuple(name for name in names if not is_ubuntus(packages[name]))
    utils = next((match for name in names if (match := UTILS.fullmatch(name))), None)
    if not utils:
        return Driver(packages=names, foreign=foreign)
    branch, version = utils["branch"], re.match(r"[\d.]+", packages[utils[0]]["version"])
    modules = [match for name in names if (match := MODULES.fullmatch(name)) and match["branch"] == branch]
    dkms = [match for name in names if (match := DKMS.fullmatch(name)) and match["branch"] == branch]
    # A module package is of one kernel (…-5.15.0-203-generic) or of a kind of kernels (…-generic).
    of_kernel = [match["kernel"] for match in modules if match["kernel"][0].isdecimal()]
    of_kind = [match["kernel"] for match in modules if match["kernel"] not in of_kernel]
    is_open = any(match["open"] for match in [*modules, *dkms])
    return Driver(
        branch=branch,
        version=version[0] if version else "",
        kind="open" if is_open else "proprietary" if modules or dkms else "",
        dkms=bool(dkms) and not of_kind,
        follows=bool(dkms) or kernel in of_kind,
        kernels=(*of_kernel, *(entry.partition("/")[2] for entry in machine["dkms"])),
        packages=names,
        foreign=foreign,
    )


def kernel_kind(packages: Packages, running: str) -> str:
    """generic-hwe-22.04, oem-24.04c, …: of the running flavour the newest that is installed, which GRUB boots.

    Where no package keeps that flavour new (it is somebody's own, or was taken away), the newest of all.
    """
    flavour = re.sub(r".*\d-", "", running)
    kinds: dict[str, tuple[bool, list[int]]] = {}
    for name, package in packages.items():
        # linux-image-virtual is the generic kernel without its rarer modules, for virtual machines.
        match = KERNEL.fullmatch(name.replace("virtual", "generic"))
        if match:
            kinds[match["kind"]] = (match["flavour"] == flavour, version_key(package["version"]))
    return max(kinds, key=lambda kind: kinds[kind]) if kinds else ""


def common_kind(generations: list[str]) -> str:
    """The kind of modules that all of the cards accept, open where both are possible; "" where there is none."""
    accepted = [GENERATIONS[name].kinds for name in generations]
    return next((kind for kind in ("open", "proprietary") if all(kind in kinds for kinds in accepted)), "")


def branch_problem(branch: str, generations: list[str]) -> str:
    """Why no driver of this branch does for these cards."""
    number = int(branch.partition("-")[0])
    for name in generations:
        generation = GENERATIONS[name]
        if number < generation.first:
            return f"{name} cards and torch need {generation.first} or later"
        if generation.last and number > generation.last:
            return f"{generation.last} is the last branch that knows {name} cards"
    return ""


def reason_to_install(driver: Driver, generations: list[str], machine: dict[str, Any]) -> str:
    """Why the driver that is installed does not do; "" where it does."""
    if not driver.branch:
        return "no driver is installed"
    here = f"driver {driver.branch} is installed"
    if reason := branch_problem(driver.branch, generations):
        return f"{here}, and {reason}"
    for name in generations:
        if driver.kind and driver.kind not in GENERATIONS[name].kinds:
            return f"{here} with {driver.kind} modules, and {name} cards need the other kind"
    if not driver.follows:
        return f"{here} without the package that brings its modules with each kernel"
    # Without it no program gets a card: CUDA says that the system is not yet initialized.
    fabric = machine["packages"].get(fabric_manager(driver.branch), {"version": ""})["version"]
    if machine["switches"] and not fabric.startswith(f"{driver.version}-"):
        return f"{here} without the nvidia-fabricmanager of its version, which NVSwitches need"
    return ""


def fabric_manager(branch: str) -> str:
    return f"nvidia-fabricmanager-{branch.partition('-')[0]}"


def packages_to_install(node: Node) -> list[str]:
    """Canonical's signed modules and what belongs to them, and the kernel's own package: the two move together."""
    packages, branch = node.machine["packages"], node.branch
    suffix = "-open" if common_kind(node.generations) == "open" else ""
    kinds = f"{node.kernel}|{node.kernel.replace('generic', 'virtual')}"
    desktop = {"xserver-xorg-core", "gdm3", "sddm", "lightdm"} & set(packages)
    return [
        f"linux-modules-nvidia-{branch}{suffix}-{node.kernel}",
        *(name for name in sorted(packages) if re.fullmatch(rf"linux-(image|headers)-({kinds})", name)),
        f"nvidia-driver-{branch}{suffix}" if desktop else f"nvidia-headless-no-dkms-{branch}{suffix}",
        f"nvidia-utils-{branch}",
        *([fabric_manager(branch)] if node.machine["switches"] else []),
    ]


def cards_problem(node: Node) -> str:
    """Why there is no driver for these cards, or none of this branch."""
    if not node.generations:
        numbers = ", ".join(card["device_id"] for card in node.gpu["cards"])
        return (
            f"its NVIDIA card ({numbers}) is a Kepler or older, which torch cannot use. Take it out, or say both "
            "nvidia_driver_enabled: false and training_cards: none for this node in hosts.yml: it trains on its "
            "processor then."
        )
    if not common_kind(node.generations):
        return (
            f"no driver knows all of its cards: {' and '.join(node.generations)} need different kinds of modules. Put "
            "one of them into another node."
        )
    if not re.fullmatch(r"\d{3}(-server)?", node.branch):
        return f"nvidia_driver_branch is {node.branch!r}; it is a number of three digits, with -server or without."
    if node.machine["switches"] and not node.branch.endswith("-server"):
        return (
            f"nvidia_driver_branch is {node.branch}, and the fabricmanager that its NVSwitches need is made for "
            f"-server branches. Say {node.branch}-server."
        )
    reason = branch_problem(node.branch, node.generations)
    return (
        f"nvidia_driver_branch is {node.branch}, but {reason}. Correct it in settings.yml." if reason else ""
    )


def foreign_problem(node: Node) -> str:
    """Why the driver is none that this role may look after."""
    if node.distribution != "Ubuntu":
        system = f"it has an NVIDIA card and runs {node.distribution}"
        return f"{system}; only Ubuntu's driver packages are known here. {LEAVE}"
    if node.machine["run_file"] or (node.gpu["driver"] and not node.driver.packages):
        return (
            "its driver comes from NVIDIA's .run file, which no package manager knows of. Take it away on the node "
            f"(sudo nvidia-uninstall), restart it and run this again. {LEAVE}"
        )
    if node.driver.foreign:
        return (
            f"its driver comes from another repository than Ubuntu's ({', '.join(node.driver.foreign[:3])}). Take it "
            f"away there (sudo apt-get purge {' '.join(node.driver.foreign)}; then that repository's file below "
            f"/etc/apt/sources.list.d), restart it and run this again. {LEAVE}"
        )
    return ""


def system_problem(node: Node) -> str:
    """Why it is useless to install or to load a driver."""
    driver, machine = node.driver, node.machine
    if node.live:
        return (
            "it runs a live system (from a USB stick, say), which starts again without whatever is installed now. "
            "Install Ubuntu on its disk."
        )
    if driver.dkms and machine["secure_boot"] and not (node.gpu["driver"] or machine["key_enrolled"]):
        return (
            "Secure Boot is on, its driver is built on the node by DKMS, and the firmware does not know the key that "
            "signs it, so the kernel does not load it. Take that away (sudo apt-get purge nvidia-dkms-"
            f"{driver.branch}{driver.suffix}) and run this again: modules that Canonical has signed take its place. Or "
            "enrol the key (sudo mokutil --import /var/lib/shim-signed/mok/MOK.der, a restart, and Enroll MOK on its "
            "screen)."
        )
    if not node.kernel:
        return (
            f"its kernel, {machine['kernel']}, is none that a package of Ubuntu's keeps new (linux-image-generic, "
            "linux-image-generic-hwe-22.04 and so on), so there are no signed modules for it. Install one of those "
            f"(sudo apt-get install linux-image-generic), restart it and run this again. {LEAVE}"
        )
    return ""


def hold_problem(node: Node) -> str:
    """Why apt would not put another branch in the place of the driver's."""
    packages = node.machine["packages"]
    held = [name for name in node.driver.packages if packages[name].get("want") == "hold"]
    if not held or node.driver.branch == node.branch:
        return ""
    return (
        f"but it is held, so apt would not put {node.branch} in its place. Let go of it there (sudo apt-mark unhold "
        f"{' '.join(held)}) and run this again. {LEAVE}"
    )


def modules_problem(node: Node) -> str:
    """Why no restart brings the driver's modules; "" where they are there for this kernel or for a newer one."""
    driver, kernel = node.driver, node.machine["kernel"]
    if any(version_key(has) >= version_key(kernel) for has in driver.kernels):
        return ""
    dkms = [name for name in driver.packages if DKMS.fullmatch(name)]
    if dkms:
        way_out = (
            f"Take away what builds them there (sudo apt-get purge {' '.join(dkms)}) and run this again: modules that "
            "Canonical has signed take their place."
        )
    else:
        way_out = (
            f"Install linux-modules-nvidia-{driver.branch}{driver.suffix}-{kernel}, and run this again. Where apt has "
            "none: start an older kernel (in GRUB's menu), or wait some days for it."
        )
    return (
        f"driver {driver.version} is installed, and has no modules for its kernel, {kernel}, nor for a newer one (sudo "
        f"dkms status, apt-mark showhold). {way_out} {LEAVE}"
    )


def power_problem(node: Node) -> str:
    """Why the power limit cannot be set."""
    limit = node.power_limit
    for card in node.gpu["smi"]:
        least, most = card["power_min"], card["power_max"]
        if limit and not least <= limit <= most:
            span = f"takes {least:.0f} to {most:.0f} W" if most else "takes no limit"
            return f"gpu_power_limit is {limit} W, but its {card['name']} {span}. Correct that in hosts.yml."
    return ""


def are_ready(node: Node) -> bool:
    """Whether ranks find the cards as aura-gpu.service makes them."""
    cards, limit = node.gpu["smi"], node.power_limit
    limited = all(not limit or card["power_limit"] == limit for card in cards)
    return node.machine["devices"] and limited and all(card["persistence"] for card in cards)


def decide(node: Node) -> dict[str, Any]:
    """The decision about a node with cards; what it leaves out is as in driver_decision."""
    driver, machine, loaded = node.driver, node.machine, node.gpu["driver"]
    if problem := cards_problem(node) or foreign_problem(node):
        return {"problem": problem}
    why = reason_to_install(driver, node.generations, machine)
    if not why and loaded == driver.version and node.gpu["smi"]:
        return {"driver": driver.version, "problem": power_problem(node), "ready": are_ready(node)}
    if problem := system_problem(node):
        return {"problem": problem}
    if why and (problem := hold_problem(node)):
        return {"problem": f"{why}; {problem}"}
    if why:
        packages = packages_to_install(node)
        command = f"sudo apt-get update && sudo apt-get install {' '.join(packages)}"
        branch = node.branch.partition("-")[0]
        return {"action": "install", "why": why, "packages": packages, "command": command, "driver": branch}
    if not loaded and (problem := modules_problem(node)):
        return {"problem": problem}
    silent = ", but nvidia-smi gives no answer" if loaded == driver.version else ""
    why = f"driver {driver.version} is installed, and {loaded or 'none'} is loaded{silent}"
    loads = not loaded and not machine["nouveau"] and machine["kernel"] in driver.kernels
    return {"action": "load" if loads else "restart", "why": why, "driver": driver.version}


def driver_decision(
    gpu: Gpu,
    runs: list[str],
    branch: str,
    enabled: bool = True,
    power_limit: int = 0,
    distribution: str = "Ubuntu",
    live: bool = False,
) -> dict[str, Any]:
    """What to do about the driver of a node.

    gpu: the fact. runs: the units of a run that are active. The others: see Node. The answer has
    ours: whether there are cards to look after;
    action: `none`, `install` (of packages; command: what a person would type for it; a restart may follow), `load` (the
    modules are there) or `restart`; why: the reason; ready: whether the cards are as ranks need them;
    driver: the version that runs when that is done (of what is to be installed: the branch);
    problem: a sentence where nothing of this can be done; runs: as given.
    """
    answer = {
        "action": "none", "why": "", "problem": "", "packages": [], "command": "", "driver": "", "ready": False,
        "ours": bool(enabled and gpu["cards"] and not gpu["elsewhere"]), "runs": runs,
    }  # fmt: skip
    if not answer["ours"]:
        return answer
    # An old card beside one that can train is nobody's business.
    generations = list(dict.fromkeys(card["generation"] for card in gpu["cards"]))
    generations = [name for name in generations if name != TOO_OLD]
    kernel = kernel_kind(gpu["machine"]["packages"], gpu["machine"]["kernel"])
    driver = find_driver(gpu["machine"], kernel)
    answer |= decide(Node(gpu, generations, driver, kernel, branch, int(power_limit), distribution, live))
    if answer["action"] == "install" and runs:
        answer["problem"] = (
            f"a run is active there, and its driver cannot be changed under it ({answer['why']}). End the run first: "
            "ansible-playbook playbooks/stop.yml."
        )
    return answer


def card_line(card: dict[str, Any]) -> str:
    """What a person reads of a card that nvidia-smi knows."""
    limit = (
        f", at most {card['power_limit']:.0f} W of {card['power_default']:.0f} W"
        if card["power_limit"]
        else ""
    )
    return f"{card['name']}, {card['memory_mib']} MiB, driver {card['driver']}, {card['uuid']}{limit}"


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"card_line": card_line, "driver_decision": driver_decision}
