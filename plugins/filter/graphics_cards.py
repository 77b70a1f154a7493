"""Which graphics cards of a node train, and which build of torch fits them and their driver: from the fact `gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Gpu = Mapping[str, Any]  # the fact: see modules/gpu_facts.py
Card = Mapping[str, Any]
Answer = dict[str, str]  # {"build": "cu126", "problem": ""}, or no build and a sentence


class Build(NamedTuple):
    """What a build of torch needs: a driver, and cards between two compute capabilities for which it has code."""

    driver: tuple[int, ...]
    first: tuple[int, int]
    last: tuple[int, int]


# Of torch 2.13, for Linux on x86; auto takes the first that fits. Compute capabilities: PyTorch's support matrix
# (RELEASE.md; for newer Blackwell cards CUDA 13's builds bring PTX). Drivers: NVIDIA, "CUDA Compatibility".
BUILDS = {
    "cu130": Build((580,), (7, 5), (12, 9)),
    "cu126": Build((525, 60, 13), (5, 0), (9, 0)),
    "cu132": Build((580,), (7, 5), (12, 9)),
}


def version_key(text: str) -> tuple[int, ...]:
    """'535.183.01' as (535, 183, 1)."""
    return tuple(int(part) for part in str(text).split(".") if part.isdecimal())


def is_too_old(card: Card) -> bool:
    """Whether torch cannot use this card of the bus with any driver: a Kepler, or older."""
    return version_key(card["capability"]) < min(build.first for build in BUILDS.values())


def missing_cards_problem(gpu: Gpu) -> str:
    """The sentence about cards on the bus that the driver does not know; "" where it knows all that could train.

    A card that is too old is nobody's loss beside one that works (a GT 710 for the monitor).
    """
    known = {card["pci"] for card in gpu["smi"]}
    missing = [card for card in gpu["cards"] if card["pci"] not in known and not (known and is_too_old(card))]
    if not missing:
        return ""
    which = ", ".join(f"{card['device_id']} at {card['pci']}" for card in missing)
    if known:
        return f"nvidia-smi does not see one of its {len(gpu['cards'])} NVIDIA cards ({which})"
    driver = f"driver {gpu['driver']} does not answer" if gpu["driver"] else "no NVIDIA driver is loaded"
    return f"it has an NVIDIA card ({which}), but {driver}"


def training_cards(
    gpu: Gpu, wanted: str | list[str] = "free", without_driver: bool = False
) -> dict[str, Any]:
    """cards: those that train, in nvidia-smi's order (none: the processor does); left_out: the names of the others;
    problem: what is wrong.

    wanted: free (the only card, of several those that drive no display), all, none, or UUIDs or their beginnings.
    without_driver: a card that its driver does not know is no reason to stop.
    """
    words = [wanted] if isinstance(wanted, str) else [str(word) for word in wanted]
    smi: list[Card] = gpu["smi"]
    problem = "" if without_driver or words == ["none"] else missing_cards_problem(gpu)
    if words == ["none"]:
        cards = []
    elif words == ["free"]:
        # A node's only card trains, display or not. So do several that all drive one.
        cards = [card for card in smi if not card["display_active"]] or smi
    elif words == ["all"]:
        cards = smi
    else:
        named = {
            word: [card for card in smi if card["uuid"].lower().startswith(word.lower())] for word in words
        }
        cards = [card for card in smi if any(card in hits for hits in named.values())]
        problem = problem if not smi else ""  # who names cards does without the others
        unknown = [word for word, hits in named.items() if not hits]
        if unknown and not problem:
            there = "; ".join(f"{card['name']} ({card['uuid']})" for card in smi) or "none"
            problem = f"training_cards names {unknown[0]}, which is none of its cards. There are: {there}"
    if problem:
        return {"cards": [], "left_out": [], "problem": problem}
    left_out = [f"{card['name']} ({card['uuid']})" for card in smi if card not in cards]
    return {"cards": cards, "left_out": left_out, "problem": ""}


def misfit(name: str, cards: list[Card], driver: str) -> str:
    """Why this build cannot use these cards with this driver; "" where it can."""
    build = BUILDS[name]
    for card in cards:
        if not build.first <= version_key(card["compute_capability"]) <= build.last:
            return f"{name} has no code for {card['name']} (compute capability {card['compute_capability']})"
    needs = ".".join(map(str, build.driver))
    return (
        f"{name} needs driver {needs} or later, and it has {driver}"
        if version_key(driver) < build.driver
        else ""
    )


def cards_without_driver(gpu: Gpu, wanted: str | list[str]) -> list[Card]:
    """The cards of the bus that will train, before a driver knows them: who drives a display is a guess."""
    cards = [
        card | {"name": card["device_id"], "compute_capability": card["capability"]} for card in gpu["cards"]
    ]
    cards = [card for card in cards if not is_too_old(card)] if wanted not in ("none", ["none"]) else []
    return [card for card in cards if wanted in ("free", ["free"]) and not card["boot_vga"]] or cards


def torch_build(
    gpu: Gpu, backend: str = "auto", wanted: str | list[str] = "free", driver: str = ""
) -> Answer:
    """The build of torch for a node.

    backend: auto (by the driver; without one the processor's build), or the name of a build. wanted: as in
    training_cards. driver: the one that runs after the next start, where there is one; else the loaded one counts.
    """
    if backend not in ("auto", "cpu", *BUILDS):
        names = ", ".join(["cpu", *sorted(BUILDS)])
        return {
            "build": "",
            "problem": f"torch_backend is {backend}, but it has to be auto or one of {names}",
        }
    selected = training_cards(gpu, wanted, without_driver=True)
    cards = selected["cards"] if gpu["smi"] or not driver else cards_without_driver(gpu, wanted)
    if backend == "cpu" or (not cards and (not gpu["smi"] or not selected["problem"])):
        return {"build": "cpu" if backend == "auto" else backend, "problem": ""}
    misfits = {name: misfit(name, cards, driver or gpu["driver"]) for name in BUILDS}
    tried = [name for name in BUILDS if backend in ("auto", name)]
    fitting = [name for name in tried if not misfits[name]]
    problem = selected["problem"] if gpu["smi"] else ""
    if not fitting and not problem:
        problem = (
            f"no build of torch fits ({'; '.join(misfits[name] for name in tried)}): install a newer driver, say with "
            "training_cards which cards train, or another torch_backend (auto, cpu)"
        )
    return {"build": "" if problem else fitting[0], "problem": problem}


def torch_builds(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Answer]:
    """torch_build for each node of a cluster (its arguments, by the node's name): one build for all cards.

    With another build comes another NCCL, which refuses to talk to it. So every node with cards takes the first build
    that all of them can use; a build that a node is told stays, and the others follow it where they can. release: of a
    node that keeps the build it has, if that fits: its link leads to TRAINER-BUILD-WHEELHOUSE.
    """
    told: dict[str, dict[str, Any]] = {}
    for name, node in nodes.items():
        own = {word: value for word, value in node.items() if word != "release"}
        kept = f"{node.get('release', '')}--".split("-")[1]
        keeps = (
            own["backend"] == "auto" and kept in BUILDS and torch_build(**{**own, "backend": kept})["build"]
        )
        told[name] = {**own, "backend": kept} if keeps else own
    found = {name: torch_build(**node) for name, node in told.items()}
    following = [name for name in told if told[name]["backend"] == "auto" and found[name]["build"] in BUILDS]
    fixed = {answer["build"] for name, answer in found.items() if name not in following} & set(BUILDS)
    usable = {
        name: [build for build in BUILDS if torch_build(**{**told[name], "backend": build})["build"]]
        for name in following
    }
    common = [build for build in BUILDS if fixed <= {build} and all(build in of for of in usable.values())]
    alone = "; ".join(f"{name}: {' or '.join(of)}" for name, of in usable.items())
    problem = (
        f"no build of torch fits the cards of all nodes ({alone}). Give one of them a newer driver, or say in its line "
        "of hosts.yml training_cards: none (it trains on its processor), or torch_backend for each of them"
    )
    for name in following:
        found[name] = {"build": common[0], "problem": ""} if common else {"build": "", "problem": problem}
    return found


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"torch_build": torch_build, "torch_builds": torch_builds, "training_cards": training_cards}
