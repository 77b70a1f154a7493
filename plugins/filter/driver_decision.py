"""Which driver a node's cards need, and whether it may be installed: from the fact `gpu` (modules/gpu_facts.py)."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

Seen = dict[str, Any]


class Generation(NamedTuple):
    """least, last: the branches that serve (0: no end yet). modules: the kinds."""

    least: int
    last: int = 0
    modules: tuple[str, ...] = ("open", "proprietary")


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
    "Blackwell": Generation(580, modules=("open",)),  # and what came after it
}
TOO_OLD = "Kepler"  # and all before it: torch has no build for them

DRIVER = re.compile(
    r"(nvidia-(driver|headless|utils|compute-utils|kernel-common|kernel-source|dkms|open)|libnvidia-compute"
    r"|linux-modules-nvidia|cuda-drivers)\b"
)
MODULES = re.compile(r"linux-modules-nvidia-(?P<branch>\d+(?:-server)?)(?P<open>-open)?-(?P<kernel>[a-z].*)")
DKMS = re.compile(r"nvidia-dkms-(?P<branch>\d+(?:-server)?)(?P<open>-open)?")
UTILS = re.compile(r"nvidia-utils-(?P<branch>\d+(?:-server)?)")
# The packages that keep Ubuntu's kernels new, by the kernel's kind: generic-hwe-22.04 and oem-24.04c are two.
KERNEL = re.compile(
    r"linux-image-(?!extra)(?P<kind>(?P<flavour>[a-z][a-z-]*?)(?:-hwe)?(?:-\d\d\.\d\d[a-z]?)?(?:-edge)?)"
)
LEAVE = "Or leave everything about its cards to yourself: nvidia_driver_enabled: false for this node in hosts.yml."


def ubuntus(package: dict[str, str]) -> bool:
    """Whether Ubuntu's own archive made it, and not NVIDIA's repository or a PPA (graphics-drivers writes ~gpu)."""
    return (
        bool(re.search(r"ubuntu|canonical", package["maintainer"], re.IGNORECASE))
        and "~gpu" not in package["version"]
    )


class Found(NamedTuple):
    """The driver that the packages of a node make up."""

    branch: str = ""  # 580-server
    version: str = ""  # 580.95.05
    kind: str = ""  # of its modules: open, proprietary
    built: bool = False  # by DKMS, on the node
    follows: bool = False  # a package brings the modules of each new kernel
    names: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()  # those that are not Ubuntu's

    @property
    def number(self) -> int:
        return int(self.branch.partition("-")[0] or 0)


def found_driver(packages: dict[str, dict[str, str]], kernel: str) -> Found:
    names = tuple(sorted(name for name in packages if DRIVER.match(name)))
    strangers = tuple(name for name in names if not ubuntus(packages[name]))
    utils = next((match for name in names if (match := UTILS.fullmatch(name))), None)
    if not utils:
        return Found(names=names, strangers=strangers)
    branch = utils["branch"]
    upstream = re.match(r"[\d.]+", packages[utils[0]]["version"])
    prebuilt = [match for name in names if (match := MODULES.fullmatch(name)) and match["branch"] == branch]
    single = [name for name in names if re.match(rf"linux-modules-nvidia-{branch}-(open-)?\d", name)]
    built = [match for name in names if (match := DKMS.fullmatch(name)) and match["branch"] == branch]
    is_open = any(match["open"] for match in [*prebuilt, *built]) or any("-open-" in name for name in single)
    return Found(
        branch=branch,
        version=upstream[0] if upstream else "",
        kind="open" if is_open else "proprietary" if prebuilt or built or single else "",
        built=bool(built) and not prebuilt,
        follows=bool(built) or any(match["kernel"] == kernel for match in prebuilt),
        names=names,
        strangers=strangers,
    )


def kernel_kind(packages: dict[str, dict[str, str]], running: str) -> str:
    """generic-hwe-22.04, oem-24.04c, …: of the running flavour the newest that is installed, which GRUB boots.

    Where no package keeps that flavour new (it is somebody's own, or was taken away), the newest of all.
    """
    flavour = re.sub(r".*\d-", "", running)
    kinds: dict[str, tuple[bool, list[int]]] = {}
    for name, package in packages.items():
        # linux-image-virtual is the generic kernel without its rarer modules, for virtual machines.
        match = KERNEL.fullmatch(name.replace("virtual", "generic"))
        if match:
            kinds[match["kind"]] = (match["flavour"] == flavour, numbers(package["version"]))
    return max(kinds, key=lambda kind: kinds[kind]) if kinds else ""


def wanted_kind(generations: list[str]) -> str:
    """The kind of modules that all of the cards accept, open where both are possible; empty when there is none."""
    accepted = [GENERATIONS[name].modules for name in generations]
    return next((kind for kind in ("open", "proprietary") if all(kind in of for of in accepted)), "")


def unfit_branch(number: int, generations: list[str]) -> str:
    """Why no driver of this branch does for these cards: empty when one may."""
    for name in generations:
        of = GENERATIONS[name]
        if number < of.least:
            return f"{name} cards and torch need {of.least} or later"
        if of.last and number > of.last:
            return f"{of.last} is the last branch that knows {name} cards"
    return ""


def unfit(driver: Found, generations: list[str], machine: Seen) -> str:
    """Why the driver that is installed does not do: empty when it does."""
    if not driver.branch:
        return "no driver is installed"
    here = f"driver {driver.branch} is installed"
    reason = unfit_branch(driver.number, generations)
    if reason:
        return f"{here}, and {reason}"
    for name in generations:
        if driver.kind and driver.kind not in GENERATIONS[name].modules:
            return f"{here} with {driver.kind} modules, and {name} cards need the other kind"
    if not driver.follows:
        return f"{here} without the package that brings its modules with each kernel"
    fabric = machine["packages"].get(f"nvidia-fabricmanager-{driver.number}", {"version": ""})["version"]
    if machine["switches"] and not fabric.startswith(f"{driver.version}-"):
        return f"{here} without the nvidia-fabricmanager of its version, which NVSwitches need"
    return ""


def wanted_packages(branch: str, kind: str, kernel: str, machine: Seen) -> list[str]:
    """Canonical's signed modules and what belongs to them, and the kernel's own package: the two move together."""
    packages, suffix = machine["packages"], "-open" if kind == "open" else ""
    kinds = f"{kernel}|{kernel.replace('generic', 'virtual')}"
    desktop = {"xserver-xorg-core", "gdm3", "sddm", "lightdm"} & set(packages)
    return [
        f"linux-modules-nvidia-{branch}{suffix}-{kernel}",
        *(name for name in sorted(packages) if re.fullmatch(rf"linux-(image|headers)-({kinds})", name)),
        f"nvidia-driver-{branch}{suffix}" if desktop else f"nvidia-headless-no-dkms-{branch}{suffix}",
        f"nvidia-utils-{branch}",
        *([f"nvidia-fabricmanager-{branch.partition('-')[0]}"] if machine["switches"] else []),
    ]


def not_ours(driver: Found, seen: Seen, distribution: str) -> str:
    """Why the driver is none that this role may look after: empty when it is."""
    if distribution != "Ubuntu":
        return f"it has an NVIDIA card and runs {distribution}; only Ubuntu's driver packages are known here. {LEAVE}"
    if seen["machine"]["run_file"] or (seen["driver"] and not driver.names):
        return (
            "its driver comes from NVIDIA's .run file, which no package manager knows of. Take it away on the node "
            f"(sudo nvidia-uninstall), restart it and run this again. {LEAVE}"
        )
    if driver.strangers:
        return (
            f"its driver comes from another repository than Ubuntu's ({', '.join(driver.strangers[:3])}). Take it away "
            f"there (sudo apt-get purge {' '.join(driver.strangers)}; then that repository's file below "
            f"/etc/apt/sources.list.d), restart it and run this again. {LEAVE}"
        )
    return ""


def forbidden(driver: Found, seen: Seen, kernel: str, live: bool) -> str:
    """What makes it useless to install or to load a driver: empty when nothing does."""
    loaded, machine = seen["driver"], seen["machine"]
    if live:
        return (
            "it runs a live system (from a USB stick, say), which starts again without whatever is installed now. "
            "Install Ubuntu on its disk."
        )
    if driver.built and machine["secure_boot"] and not (loaded or machine["key_enrolled"]):
        package = f"nvidia-dkms-{driver.branch}{'-open' if driver.kind == 'open' else ''}"
        return (
            "Secure Boot is on, its driver is built on the node by DKMS, and the firmware does not know the key that "
            f"signs it, so the kernel does not load it. Take that away (sudo apt-get purge {package}) and run this "
            "again: modules that Canonical has signed take its place. Or enrol the key (sudo mokutil --import "
            "/var/lib/shim-signed/mok/MOK.der, a restart, and Enroll MOK on its screen)."
        )
    if not kernel:
        return (
            f"its kernel, {machine['kernel']}, is none that a package of Ubuntu's keeps new (linux-image-generic, "
            "linux-image-generic-hwe-22.04 and so on), so there are no signed modules for it. Install one of those "
            f"(sudo apt-get install linux-image-generic), restart it and run this again. {LEAVE}"
        )
    return ""


def power_problem(cards: list[Seen], limit: int) -> str:
    """Why the power limit [W] cannot be set: empty when it can."""
    for card in cards:
        least, most = card["power_min"], card["power_max"]
        if limit and not least <= limit <= most:
            span = f"takes {least:.0f} to {most:.0f} W" if most else "takes no limit"
            return f"gpu_power_limit is {limit} W, but its {card['name']} {span}. Correct that in hosts.yml."
    return ""


def module_kernels(machine: Seen, driver: Found) -> list[str]:
    """The kernels for which the driver's modules are there."""
    single = re.compile(rf"linux-modules-nvidia-{driver.branch}(?:-open)?-(\d.*)")
    packaged = [match[1] for name in machine["packages"] if (match := single.fullmatch(name))]
    return [entry.partition("/")[2] for entry in machine["dkms"]] + packaged


def held_driver(driver: Found, machine: Seen, settings: Settings) -> str:
    """Why apt would not put another branch in its place: empty when it would."""
    names = [name for name in driver.names if machine["packages"][name].get("want") == "hold"]
    if not names or driver.branch == settings.branch:
        return ""
    return (
        f"but it is held, so apt would not put {settings.branch} in its place. Let go of it there (sudo apt-mark "
        f"unhold {' '.join(names)}) and run this again. {LEAVE}"
    )


def no_modules(machine: Seen, driver: Found) -> str:
    """Why no restart brings the driver's modules: empty when one may, since they are there for a newer kernel."""
    if any(numbers(kernel) >= numbers(machine["kernel"]) for kernel in module_kernels(machine, driver)):
        return ""
    packages = [name for name in driver.names if DKMS.fullmatch(name)]
    return (
        f"driver {driver.version} is installed, and has no modules for its kernel, {machine['kernel']}, nor for a "
        "newer one (sudo dkms status, apt-mark showhold). "
        + (
            f"Take away what builds them there (sudo apt-get purge {' '.join(packages)}) and run this again: modules "
            "that Canonical has signed take their place."
            if packages
            else f"Install linux-modules-nvidia-{driver.branch}{'-open' if driver.kind == 'open' else ''}-"
            f"{machine['kernel']}, and run this again. Where apt has none: start an older kernel (in GRUB's menu), or "
            "wait some days for it."
        )
        + f" {LEAVE}"
    )


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


class Settings(NamedTuple):
    """branch: what is installed where nothing fits. power_limit: [W], 0 for none. live: whether the system forgets."""

    branch: str
    power_limit: int = 0
    distribution: str = "Ubuntu"
    live: bool = False


def install_command(packages: list[str]) -> str:
    """What a person types to install them."""
    return f"sudo apt-get update && sudo apt-get install {' '.join(packages)}"


def cards_problem(seen: Seen, generations: list[str], settings: Settings) -> str:
    """Why there is no driver for these cards: empty when there is one."""
    if not generations:
        numbers = ", ".join(card["device_id"] for card in seen["cards"])
        return (
            f"its NVIDIA card ({numbers}) is a Kepler or older, which torch cannot use. Take it out, or say both "
            "nvidia_driver_enabled: false and training_cards: none for this node in hosts.yml: it trains on its "
            "processor then."
        )
    if not wanted_kind(generations):
        return (
            f"no driver knows all of its cards: {' and '.join(generations)} need different kinds of modules. Put one "
            "of them into another node."
        )
    if not re.fullmatch(r"\d{3}(-server)?", settings.branch):
        return f"nvidia_driver_branch is {settings.branch!r}; it is a number of three digits, with -server or without."
    if seen["machine"]["switches"] and not settings.branch.endswith("-server"):
        return (
            f"nvidia_driver_branch is {settings.branch}, and the fabricmanager that its NVSwitches need is made for "
            f"-server branches only. Say {settings.branch}-server."
        )
    reason = unfit_branch(int(settings.branch[:3]), generations)
    return (
        f"nvidia_driver_branch is {settings.branch}, but {reason}. Correct it in settings.yml."
        if reason
        else ""
    )


def are_ready(seen: Seen, limit: int) -> bool:
    """Whether ranks find the cards as aura-gpu.service makes them."""
    cards = seen["smi"]
    limited = all(not limit or card["power_limit"] == limit for card in cards)
    return seen["machine"]["devices"] and limited and all(card["persistence"] for card in cards)


def decided(seen: Seen, settings: Settings, generations: list[str]) -> dict[str, Any]:
    """The decision about a node whose cards can train."""
    machine = seen["machine"]
    kernel = kernel_kind(machine["packages"], machine["kernel"])
    driver = found_driver(machine["packages"], kernel)
    problem = not_ours(driver, seen, settings.distribution)
    if problem:
        return {"problem": problem}
    why = unfit(driver, generations, machine)
    if not why and seen["driver"] == driver.version and seen["smi"]:
        problem = power_problem(seen["smi"], settings.power_limit)
        ready = are_ready(seen, settings.power_limit)
        return {"driver": driver.version, "problem": problem, "ready": ready}
    problem = forbidden(driver, seen, kernel, settings.live)
    if problem:
        return {"problem": problem}
    if why and (held := held_driver(driver, machine, settings)):
        return {"problem": f"{why}; {held}"}
    if why:
        packages = wanted_packages(settings.branch, wanted_kind(generations), kernel, machine)
        command = install_command(packages)
        branch = settings.branch.partition("-")[0]
        return {"action": "install", "why": why, "packages": packages, "command": command, "driver": branch}
    loaded = f"{seen['driver']} is loaded" if seen["driver"] else "none is loaded"
    silent = ", but nvidia-smi gives no answer" if seen["driver"] == driver.version else ""
    why = f"driver {driver.version} is installed, and {loaded}{silent}"
    if not seen["driver"] and (problem := no_modules(machine, driver)):
        return {"problem": problem}
    is_there = machine["kernel"] in module_kernels(machine, driver)
    loads = not seen["driver"] and not machine["nouveau"] and is_there
    return {"action": "load" if loads else "restart", "why": why, "driver": driver.version}


def card_line(card: Seen) -> str:
    limit = (
        f", at most {card['power_limit']:.0f} W of {card['power_default']:.0f} W"
        if card["power_limit"]
        else ""
    )
    return f"{card['name']}, {card['memory_mib']} MiB, driver {card['driver']}, {card['uuid']}{limit}"


def driver_decision(
    gpu: Seen, runs: list[str], enabled: bool = True, power_limit: int = 0, **settings: Any
) -> dict[str, Any]:
    """What to do about the driver of a node.

    gpu: the fact. runs: the units of a run that are active. settings: see Settings. The answer has
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
    told = Settings(power_limit=int(power_limit), **settings)
    # An old card beside one that can train is nobody's business.
    generations = list(dict.fromkeys(card["generation"] for card in gpu["cards"]))
    generations = [name for name in generations if name != TOO_OLD]
    problem = cards_problem(gpu, generations, told)
    answer |= {"problem": problem} if problem else decided(gpu, told, generations)
    if answer["action"] == "install" and runs:
        answer["problem"] = (
            f"a run is active there, and its driver cannot be changed under it ({answer['why']}). End the run first: "
            "ansible-playbook playbooks/stop.yml."
        )
    return answer


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"card_line": card_line, "driver_decision": driver_decision}
