"""What was asked of launch.yml and of prepare.yml, beside the settings of a preset (those `aura config` checks)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

# Of prepare.yml; the words are those of `aura prepare`.
PREPARE = (
    "dataset_config dataset_split dataset_column dataset_revision dataset_max_tokens tokenizer "
    "validation_fraction max_errors workers"
).split()
YES = ("true", "yes", "1", "on")
# What -e may say that is no setting of a preset.
NAMES = (
    "preset run corpus text wait backend cpu training_cards rendezvous_port dataset documents_per_line "
    "accept_lossy_tokenizer"
).split()
OF_ROLES = re.compile(r"ansible_|trainer_|corpus_|inventory_check_")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
ELSEWHERE = re.compile(r"[A-Za-z0-9+.-]+:/")


def preset_settings(given: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """What of -e has to be a setting of a preset; more: what else this playbook takes."""
    own = {*NAMES, *PREPARE, *more}
    return {name: value for name, value in given.items() if name not in own and not OF_ROLES.match(name)}


def launch_problem(given: Mapping[str, Any]) -> str:
    return _name_problem(given) or _launch_problem(given)


def _name_problem(given: Mapping[str, Any]) -> str:
    """A run and a corpus are directories on the nodes, and words of a unit's command line."""
    for name in ("run", "corpus"):
        said = str(given.get(name, "a"))
        if not NAME.fullmatch(said) and not (name == "corpus" and ELSEWHERE.match(said)):
            return f"{name}={said} is no name: take letters, digits and . _ - (no space, no accent, none of . - first)."
    return ""


def _launch_problem(given: Mapping[str, Any]) -> str:
    try:
        hours = float(given.get("hours", 1))
    except ValueError:
        hours = 0
    runtime, image = given.get("runtime", "process"), str(given.get("image", ""))
    if "script" in given:
        return (
            "playbooks/launch.yml launches a preset. A script: ansible-playbook launch.yml -e script=… (or "
            "playbooks/launch_script.yml)."
        )
    if "join" in given:
        return (
            "-e join=true is no more. To take PCs into a run: ansible-playbook playbooks/stop.yml, then launch again "
            "(it goes on at the next step). A PC of this launch comes back by playbooks/join.yml --limit NODE."
        )
    if not 0 < hours < math.inf:
        return f"hours={given['hours']} is no number of hours above 0."
    if "hours" in given and given.get("preset") != "auto":
        return (
            "-e hours=… sizes the model of -e preset=auto; how long another preset trains, -e steps=… or -e tokens=… "
            "says."
        )
    if runtime not in ("process", "docker"):
        return f"There is no runtime {runtime}: take one of process, docker."
    if runtime == "process" and image:
        return "An image is of use with -e runtime=docker only."
    if re.search(r"@|^sha256:|^[0-9a-f]{64}$", image):
        return (
            f"The image is named by a digest ({image}), which a copy on another machine would not have: give it a "
            "name, docker tag … aura-trainer:mine"
        )
    return ""


def _yes(given: Mapping[str, Any], name: str) -> bool:
    return str(given.get(name, "")).lower() in YES


def datasets(words: str) -> list[str]:
    """One name (a directory may have spaces in it), or the parts of a mixture, which all have a weight."""
    return words.split() if all("=" in word for word in words.split()) else [words]


def links_problem(directory: Path) -> str:
    """What would be copied twice, without end or not at all, as links are followed: empty when nothing."""
    seen = set()
    for here, _, names in os.walk(directory, followlinks=True):
        if (real := os.path.realpath(here)) in seen:
            return (
                f"{real} is in {directory} twice, through a link, and would be learnt twice. Take the link away "
                f"(find {quote(str(directory))} -type l)."
            )
        seen.add(real)
        for name in names:
            if not (path := Path(here, name)).exists():
                return f"{path} is a link that leads nowhere. Take it away."
    return ""


def prepare_request(given: Mapping[str, Any], here: str) -> dict[str, Any]:
    """What the role corpus is told, paths relative to `here`; or the sentence that refuses it, in `problem`."""

    def path(name: str) -> Path | None:
        return Path(here, Path(str(given[name])).expanduser()).resolve() if given.get(name) else None

    def copied(what: Path | None) -> str:
        """As rsync means it: of a directory what is in it."""
        return "" if what is None or not what.exists() else f"{what}/" if what.is_dir() else str(what)

    text, tokenizer, dataset = path("text"), path("tokenizer"), datasets(str(given.get("dataset", "")))
    corpus, word = str(given.get("corpus", "")), str(given.get("tokenizer", ""))
    problem = ""
    if text and dataset:
        problem = (
            "Both a text and a dataset were named. Name one of them; a corpus of its own (-e corpus=<name>) can hold "
            "the other."
        )
    elif not dataset and not copied(text):
        problem = (
            f"{f'There is no {text} on this machine.' if text else 'No text was named.'}\n"
            "Name a file or a directory with UTF-8 text:\nansible-playbook playbooks/prepare.yml -e text=<path>\n"
            "(or a dataset of the Hugging Face hub: -e dataset=wikipedia, or a mixture: -e dataset='fineweb2-es=0.7 "
            "wikipedia=0.3')"
        )
    elif text and text.is_dir() and (wrong := links_problem(text)):
        problem = wrong
    elif ELSEWHERE.match(corpus):
        problem = (
            f"{corpus} is no corpus of the nodes: corpora in object storage are made by hand, on any machine, with "
            f"`aura prepare` and `rclone copy`, and launch.yml takes them with -e corpus={corpus}."
        )
    elif not copied(tokenizer) and re.match(r"[~.]|[^/].*[.](json|model)$", word):
        problem = (
            f"There is no tokenizer {tokenizer} on this machine. Name a file or a directory of this machine, an "
            "absolute path on the first node, or a tokenizer of the Hugging Face hub."
        )
    flags = [
        name
        for name in PREPARE
        if str(given.get(name, "")) and not (name == "tokenizer" and copied(tokenizer))
    ]
    options = [f"--{name.replace('_', '-')}={given[name]}" for name in flags]
    switches = ("documents_per_line", "accept_lossy_tokenizer")
    options += [f"--{name.replace('_', '-')}" for name in switches if _yes(given, name)]
    return {
        "problem": _name_problem(given) or problem,
        "text": copied(text),
        "dataset": dataset,
        "tokenizer": copied(tokenizer),
        "options": options,
    }


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "launch_problem": launch_problem,
            "prepare_request": prepare_request,
            "preset_settings": preset_settings,
        }
