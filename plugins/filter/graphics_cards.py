"""Which graphics cards of a node train, and which build of torch fits them and their driver."""

from __future__ import annotations

from typing import Any, NamedTuple

Gpu = dict[str, Any]  # the fact: see modules/gpu_facts.py
Card = dict[str, Any]
Answer = dict[str, str]  # {"build": "cu126", "problem": ""}, or no build and a sentence


class Build(NamedTuple):
    """What a build of torch needs: a driver, and cards between two compute capabilities for which it has code."""

    driver: tuple[int, ...]
    first: tuple[int, int]
    last: tuple[int, int]


# Of torch 2.13, for Linux on x86. Compute capabilities: PyTorch's support matrix (RELEASE.md, pull request 182849;
# for newer Blackwell cards CUDA 13's builds bring PTX). Drivers: NVIDIA, "CUDA Compatibility", minor versions.
BUILDS = {
    "cu130": Build((580,), (7, 5), (12, 9)),
    "cu126": Build((525, 60, 13), (5, 0), (9, 0)),
    "cu132": Build((580,), (7, 5), (12, 9)),
}
AUTO = ("cu130", "cu126")  # the first one that fits
FREE, ALL, NONE = "free", "all", "none"  # what training_cards may say beside UUIDs
LEAST_CAPABILITY = min(build.first for build in BUILDS.values())


def version_key(text: str) -> tuple[int, ...]:
    """'535.183.01' as (535, 183, 1)."""
    return tuple(int(part) for part in str(text).split(".") if part.isdecimal())


def dotted(numbers: tuple[int, ...]) -> str:
    """525.60.13, as NVIDIA writes it."""
    return ".".join(map(str, numbers))


def card_name(card: Card) -> str:
    return f"{card['name']} ({card['uuid']})"


def select_by_uuid(smi: list[Card], uuids: list[str]) -> tuple[list[Card], str]:
    """The cards with these UUIDs, or their beginnings as CUDA takes them; a sentence where one names no single card."""
    found: list[Card] = []
    for uuid in uuids:
        hits = [card for card in smi if uuid and card["uuid"].lower().startswith(uuid.lower())]
        if len(hits) != 1:
            there = "; ".join(map(card_name, smi)) or "none"
            what = "means several of its cards" if hits else "is none of its cards"
            return [], f"training_cards names {uuid}, which {what}. There are: {there}."
        found += [card for card in hits if card not in found]
    return found, ""


def is_too_old(card: Card) -> bool:
    """Whether torch cannot use this card of the bus with any driver: a Kepler, or older."""
    return version_key(card["capability"]) < LEAST_CAPABILITY


def missing_cards_problem(gpu: Gpu) -> str:
    """The sentence about cards on the bus that the driver does not know; "" where it knows all that could train.

    A card that is too old is nobody's loss beside one that works (a GT 710 for the monitor): drivers for the other do
    not know it. Alone it is, since its owner may count on it.
    """
    known = {card["pci"] for card in gpu["smi"]}
    missing = [card for card in gpu["cards"] if card["pci"] not in known and not (known and is_too_old(card))]
    if not missing:
        return ""
    which = ", ".join(f"{card['device_id']} at {card['pci']}" for card in missing)
    number = "one NVIDIA card" if len(gpu["cards"]) == 1 else f"{len(gpu['cards'])} NVIDIA cards"
    if gpu["smi"]:
        return f"it has {number}, but nvidia-smi does not see {which}"
    if all(map(is_too_old, missing)):
        return (
            f"it has {number} ({which}), too old for torch (Kepler, or before it); training_cards: none in its line of "
            "hosts.yml says that it trains on its processor"
        )
    driver = f"driver {gpu['driver']} does not answer" if gpu["driver"] else "no NVIDIA driver is loaded"
    return f"it has {number} ({which}), but {driver}"


def training_cards(gpu: Gpu, wanted: str | list[str] = FREE, without_driver: bool = False) -> dict[str, Any]:
    """cards: those that train, in nvidia-smi's order (none: the processor does); left_out: the names of the others;
    problem: what is wrong.

    wanted: free (the only card, of several those that drive no display), all, none, or UUIDs.
    without_driver: a card that its driver does not know is no reason to stop.
    """
    words = [wanted] if isinstance(wanted, str) else [str(word) for word in wanted]
    smi: list[Card] = gpu["smi"]
    missing = "" if without_driver or words == [NONE] else missing_cards_problem(gpu)
    cards, problem = smi, ""
    if missing and (not smi or words in ([FREE], [ALL])):
        cards, problem = [], missing
    elif words == [NONE]:
        cards = []
    elif words == [FREE]:
        # A node's only card trains, display or not. So do several that all drive one: none is worth less than another.
        cards = [card for card in smi if not card["display_active"]] or smi
    elif words != [ALL]:
        cards, problem = select_by_uuid(smi, words)
    left_out = [] if problem else [card_name(card) for card in smi if card not in cards]
    return {"cards": cards, "left_out": left_out, "problem": problem}


def misfit(name: str, cards: list[Card], driver: str) -> str:
    """Why this build cannot use these cards with this driver; "" where it can."""
    build = BUILDS[name]
    for card in cards:
        capability = card["compute_capability"]
        if not build.first <= version_key(capability) <= build.last:
            end = f" to {dotted(build.last)}" if build.last < (12,) else " on"
            span = f"{name}: from {dotted(build.first)}{end}"
            return f"{name} has no code for {card['name']} (compute capability {capability}; {span})"
    if version_key(driver) < build.driver:
        return f"{name} needs driver {dotted(build.driver)} or later, and it has {driver}"
    return ""


def cards_without_driver(gpu: Gpu, wanted: str | list[str]) -> list[Card]:
    """The cards of the bus that will train, before a driver knows them: who drives a display is a guess."""
    cards = [
        {**card, "name": card["device_id"], "compute_capability": card["capability"]}
        for card in gpu["cards"]
        if not is_too_old(card)
    ]
    if wanted in (NONE, [NONE]):
        return []
    return [card for card in cards if wanted in (FREE, [FREE]) and not card["boot_vga"]] or cards


def torch_build(gpu: Gpu, backend: str = "auto", wanted: str | list[str] = FREE, driver: str = "") -> Answer:
    """The build of torch for a node.

    backend: auto (by the driver; without one the processor's build), or the name of a build. wanted: as in
    training_cards. driver: the one that runs after the next start, where there is one; else the loaded one counts.
    """
    if backend == "cpu":
        return {"build": "cpu", "problem": ""}
    if backend not in ("auto", *BUILDS):
        names = ", ".join(["cpu", *sorted(BUILDS)])
        return {
            "build": "",
            "problem": f"torch_backend is {backend}, but it has to be auto or one of {names}",
        }
    selected = training_cards(gpu, wanted, without_driver=True)
    if selected["problem"] and gpu["smi"]:
        return {"build": "", "problem": selected["problem"].rstrip(".")}
    cards = selected["cards"]
    if driver and not gpu["smi"]:
        cards = cards_without_driver(gpu, wanted)
    if not cards:
        if backend != "auto" and not gpu["cards"] and not gpu["smi"]:
            return {
                "build": "",
                "problem": f"torch_backend is {backend}, but it has no NVIDIA card: take cpu, or auto",
            }
        return {"build": "cpu" if backend == "auto" else backend, "problem": ""}
    misfits = {name: misfit(name, cards, driver or gpu["driver"]) for name in BUILDS}
    fitting = [name for name in AUTO if not misfits[name]]
    build = backend if backend != "auto" else fitting[0] if fitting else ""
    if build and not misfits[build]:
        return {"build": build, "problem": ""}
    way_out = "install a newer driver, or take torch_backend cpu"
    if len(cards) > 1:
        way_out = (
            "install a newer driver, say with training_cards which cards train, or take torch_backend cpu"
        )
    none_fits = f"no build of torch fits ({'; '.join(misfits[name] for name in AUTO)}): {way_out}"
    if backend == "auto":
        return {"build": "", "problem": none_fits}
    way_out = f"take torch_backend {fitting[0]}, or auto" if fitting else none_fits
    return {"build": "", "problem": f"torch_backend {misfits[backend]}: {way_out}"}


def keep_build(release: str = "", **node: Any) -> dict[str, Any]:
    """torch_build's arguments for a node, with the build of its release where that fits.

    release: where its link to the release leads, whose name is TRAINER-BUILD-WHEELHOUSE.
    """
    _, build, *_ = [*release.rpartition("/")[2].split("-"), ""]
    kept = {**node, "backend": build}
    return kept if node["backend"] == "auto" and build in BUILDS and torch_build(**kept)["build"] else node


def torch_builds(nodes: dict[str, dict[str, Any]]) -> dict[str, Answer]:
    """torch_build for each node of a cluster (its arguments, by the node's name): one build for all cards.

    With another build comes another NCCL, which refuses to talk to it where ranks talk NCCL. So every node with cards
    takes the newest build that all of them can use; a build that a node is told stays, and the others follow it where
    they can. release: of a node that keeps the build it has, if that fits: with --limit the others are not seen.
    """
    nodes = {name: keep_build(**node) for name, node in nodes.items()}
    found = {name: torch_build(**node) for name, node in nodes.items()}
    with_cards = [name for name, answer in found.items() if answer["build"] not in ("cpu", "")]
    following = [name for name in with_cards if nodes[name]["backend"] == "auto"]
    usable = {
        name: [
            build
            for build in (BUILDS if name in following else [found[name]["build"]])
            if torch_build(**{**nodes[name], "backend": build})["build"]
        ]
        for name in with_cards
    }
    common = [build for build in (*AUTO, *BUILDS) if all(build in builds for builds in usable.values())]
    alone = "; ".join(f"{name}: {' or '.join(builds)}" for name, builds in usable.items())
    problem = (
        f"no build of torch fits the cards of all nodes ({alone}). Say torch_backend for each of them, in its line of "
        "hosts.yml (between PCs ranks of unlike builds talk gloo; -e backend=nccl is not for them then), "
        "training_cards: none for one that shall train on its processor, or give it a newer driver"
    )
    for name in following:
        found[name] = {"build": common[0], "problem": ""} if common else {"build": "", "problem": problem}
    return found


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"torch_build": torch_build, "torch_builds": torch_builds, "training_cards": training_cards}
