"""Who trains together in a launch: which cards of which node, and what stands in the way.

docs/decisions/0007-who-trains-together.md says why this is no Jinja.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.plugins.loader import filter_loader

Member = dict[str, Any]


def group_member(
    facts: Mapping[str, Any],
    name: str,
    release: str,
    address: str,
    wanted: str | list[str] = "free",
    cpu: bool = False,
    processes: int = 1,
) -> Member:
    """A node, with the cards that train there (wanted: training_cards) and what keeps it from training (problem).

    facts: gpu (gpu_facts) and all_ipv4_addresses (setup). release: "" without one. cpu: a card without a working driver
    is no reason not to train. processes: ranks where no card trains.
    """
    training_cards = filter_loader.get("training_cards").j2_function
    torch_build = filter_loader.get("torch_build").j2_function
    gpu, build = facts["gpu"], release.split("-")[1] if "-" in release else "auto"
    chosen = training_cards(gpu, wanted, without_driver=cpu)
    problem, way, cards = chosen["problem"], "", chosen["cards"]
    if problem and not training_cards(gpu, wanted, without_driver=True)["problem"]:
        way = " Without that card: -e cpu=true"
    elif cards:
        problem = torch_build(gpu, build, wanted)["problem"]
        if build == "cpu":
            problem = "its torch is the build for processors, though its driver works: site.yml gives it another one"
    if not release:
        problem, way = "it has no release of the trainer", ""
    elif address not in facts["all_ipv4_addresses"]:
        problem, way = f"no network card has the address {address}", ""
    return {
        "name": name, "address": address, "release": release, "build": build, "problem": problem, "way": way,
        "cards": [card["uuid"] for card in cards], "left_out": chosen["left_out"],
        "smallest": min(cards, key=lambda card: card["memory_mib"], default={"uuid": "-1", "memory_mib": 0}),
        # One per card, or so many on the processor.
        "ranks": len(cards) or max(processes, 1),
    }  # fmt: skip


def group_problems(members: Sequence[Member], same_trainer: bool = True) -> list[str]:
    """Why these nodes cannot train together as they are, of all of them."""
    sentences = [
        f"{one['name']} cannot train as it is: {one['problem']}. Nothing was started.\nRelease, driver "
        f"and address: ansible-playbook site.yml. Without this node: --limit 'cluster:!{one['name']}'.{one['way']}"
        for one in members
        if one["problem"]
    ]
    if same_trainer and len({one["release"].partition("-")[0] for one in members if one["release"]}) > 1:
        of = ", ".join(f"{one['name']} has {one['release']}" for one in members if one["release"])
        sentences.append(
            f"The nodes have different trainers: {of}. Nothing was started.\nGive all of them the same one: "
            "ansible-playbook site.yml\nWhere rollback.yml has gone back, a node that it has not taken back gets that "
            "one by site.yml of an older checkout, or all the newer one: site.yml -e trainer_forward=true"
        )
    return sentences


def group_notes(members: Sequence[Member]) -> list[str]:
    """On what the ranks train, where that is not the same or not all."""
    builds: dict[str, list[str]] = {}
    for one in members:
        builds.setdefault(one["build"], []).append(one["name"])
    of = "; ".join(f"{build} on {', '.join(builds[build])}" for build in sorted(builds))
    unlike = [f"Unlike builds of torch: {of}."] if len(builds) > 1 else []
    return unlike + [
        f"{one['name']} does not train on {', '.join(one['left_out'])} (training_cards says which cards train)."
        for one in members
        if one["left_out"]
    ]


def sizing(members: Sequence[Member], begun: Sequence[str]) -> dict[str, Any]:
    """Which node says what preset=auto is, for which of its cards, and for how many.

    One on which the run has begun, else that with the smallest card, a processor before all. `aura plan` takes as many
    ranks of each node: where they have unlike numbers, the mean, rounded down.
    """
    smallest = min(members, key=lambda one: one["smallest"]["memory_mib"])
    node = next((one for one in members if one["name"] in begun), smallest)
    each = sum(one["ranks"] for one in members) // len(members)
    words = ["--nodes", str(len(members)), "--ranks-per-node", str(each)]
    return {"node": node["name"], "card": node["smallest"]["uuid"], "words": words}


def still_active(nodes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a rank or a script goes on, of nodes as roles/trainer/tasks/status.yml has set them.

    A node that does not answer is not waited for, nor a rank that came back when the others had done all.
    """
    answering = [node for node in nodes if node["trainer_answers"]]
    ranks = [rank for node in answering for rank in node["trainer_status"]]
    late = any(rank.get("state") == "done" for rank in ranks)
    return any(node["script_status"].get("active") for node in answering) or any(
        rank["unit"]["ActiveState"] not in ("inactive", "failed")
        and not (late and rank.get("state") == "joining")
        for rank in ranks
    )


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "group_member": group_member,
            "group_notes": group_notes,
            "group_problems": group_problems,
            "sizing": sizing,
            "still_active": still_active,
        }
