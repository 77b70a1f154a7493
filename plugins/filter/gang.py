"""Who trains together in a launch: which cards of which node, what stands in the way, and what each rank is told."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.plugins.loader import filter_loader

Seen = Mapping[str, Any]  # what node_state says
Member = dict[str, Any]
PROCESSOR = {"uuid": "-1", "memory_mib": 0}
NO_RECORD: dict[str, Any] = {"written": 0.0, "model": {}}
ENDED = ("inactive", "failed")
MEMORY = "/dev/shm/aura-train"  # noqa: S108 - aura-train.conf of the role trainer makes it, for aura alone


def gang_member(
    seen: Seen,
    name: str,
    address: str,
    wanted: str | list[str] = "free",
    cpu: bool = False,
    processes: int = 1,
) -> Member:
    """A node, with the cards that train there (wanted: training_cards) and what keeps it from training (problem).

    cpu: a card without a working driver is no reason not to train. processes: ranks where no card trains.
    """
    training_cards = filter_loader.get("training_cards").j2_function
    torch_build = filter_loader.get("torch_build").j2_function
    release = seen["files"]["/opt/aura/current"]["target"].rpartition("/")[2]
    build = release.split("-")[1] if "-" in release else "auto"
    chosen, otherwise = (training_cards(seen["gpu"], wanted, without_driver=way) for way in (cpu, True))
    problem = chosen["problem"].rstrip(".")
    way = ""
    if problem and not otherwise["problem"]:
        only = ", ".join(card["name"] for card in otherwise["cards"])
        way = f" With {only} only: -e cpu=true" if only else " On its processor: -e cpu=true"
    here = [address.partition("/")[0] for card in seen["cards"] for address in card["addresses"]]
    if not release:
        problem, way = "it has no release of the trainer", ""
    elif address not in here:
        problem, way = f"no network card has the address {address}", ""
    elif chosen["cards"] and not problem:
        problem = torch_build(seen["gpu"], build, wanted)["problem"]
        if build == "cpu" and not problem:
            problem = (
                "its torch is the build for processors, though its driver works: site.yml gives it one that uses the "
                "card"
            )
    return {
        "name": name,
        "address": address,
        "release": release,
        "build": build,
        "cards": [card["uuid"] for card in chosen["cards"]],
        "smallest": min(chosen["cards"], key=lambda card: card["memory_mib"], default=PROCESSOR),
        # One per card, or so many on the processor.
        "ranks": len(chosen["cards"]) or max(processes, 1),
        "left_out": chosen["left_out"],
        "problem": problem,
        "way": way,
    }


def gang_problems(members: Sequence[Member], same_trainer: bool = True) -> list[str]:
    """Why these nodes cannot train together as they are, of all of them."""
    said = [
        f"{one['name']} cannot train as it is: {one['problem']}. Nothing was started.\nRelease, driver "
        f"and address: ansible-playbook site.yml. Without this node: --limit 'cluster:!{one['name']}'.{one['way']}"
        for one in members
        if one["problem"]
    ]
    releases = {one["release"].partition("-")[0]: one["release"] for one in members if one["release"]}
    if same_trainer and len(releases) > 1:
        of = ", ".join(f"{one['name']} has {one['release']}" for one in members if one["release"])
        said.append(
            f"The nodes have different trainers: {of}. Nothing was started.\nGive all of them the same one: "
            "ansible-playbook site.yml\nWhere rollback.yml has gone back, a node that it has not taken back gets that "
            "one by site.yml of an older checkout, or all the newer one: site.yml -e trainer_forward=true"
        )
    return said


def gang_words(members: Sequence[Member]) -> list[str]:
    """On what the ranks train, where that is not the same or not all."""
    builds = [
        f"{build} on {', '.join(one['name'] for one in of)}"
        for build, of in groupby(sorted(members, key=lambda one: one["build"]), lambda one: one["build"])
    ]
    unlike = [f"Unlike builds of torch: {'; '.join(builds)}."] if len(builds) > 1 else []
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


def rank_files(members: Sequence[Member], name: str, run: Mapping[str, Any]) -> list[dict[str, str]]:
    """What each rank of this node is told, as write_files takes it, in torch.distributed's standard variables.

    run: name, preset, corpus, backend and overrides; port, threads (0: torch's), link_mbit, image or "", language,
    step_tokens (0: as the settings say), and launch, which tells this launch from others.
    """
    index = [one["name"] for one in members].index(name)
    node, first = members[index], sum(one["ranks"] for one in members[:index])
    overrides = [
        word for key, value in run["overrides"].items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    arguments = [
        "--preset", run["preset"], "--corpus", f"/var/lib/aura/corpora/{run['corpus']}",
        "--run-dir", f"/var/lib/aura/runs/{run['name']}", "--backend", run["backend"], *overrides,
    ]  # fmt: skip
    # Several nodes can go on without one: each rank knows where all others are. One rank alone says there that the run
    # was launched again, to who comes back from a launch of several.
    peers = ",".join(one["address"] for one in members for _ in range(one["ranks"]))
    files = []
    for local in range(node["ranks"]):
        told = {
            "RANK": first + local,
            "LOCAL_RANK": local,
            "WORLD_SIZE": sum(one["ranks"] for one in members),
            "LOCAL_WORLD_SIZE": node["ranks"],
            "MASTER_ADDR": members[0]["address"],
            "MASTER_PORT": run["port"],
            "AURA_PEERS": peers if len(members) > 1 or node["ranks"] == 1 else None,
            "AURA_LAUNCH": run["launch"],
            "AURA_STEP_TOKENS": run["step_tokens"] or None,
            # Where copies of the run are between two checkpoints; in containers there are none.
            "AURA_MEMORY": None if run["image"] else MEMORY,
            # By their UUIDs: their numbers change with the slots, the driver and the day. -1: none.
            "CUDA_VISIBLE_DEVICES": ",".join(node["cards"]) or "-1",
            # start-rank finds the network card that has it. (For another one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.)
            "AURA_ADDRESS": node["address"],
            "OMP_NUM_THREADS": run["threads"] or None,
            # What the plan counts with.
            "AURA_LINK_MBIT": run["link_mbit"],
            "AURA_NODE": name,
            "AURA_LANG": run["language"],
            "AURA_RELEASE": f"/opt/aura/releases/{node['release']}",
            "AURA_IMAGE": run["image"] or None,
            "AURA_TRAIN_ARGUMENTS": shlex.join(arguments),
        }
        lines = [line_of(key, value) for key, value in told.items() if value is not None]
        text = f"# Written by Ansible (role trainer) for one rank of run {run['name']}.\n{''.join(lines)}"
        files.append(
            {"path": f"/etc/aura/rank-{local}.env", "content": text, "group": "aura", "mode": "0640"}
        )
    return files


def line_of(key: str, value: object) -> str:
    """Of a file of variables. systemd takes what stands behind a line break for another variable, in quotes too."""
    if any(letter < " " for letter in str(value)):
        raise AnsibleFilterError(f"{key} would have a line break in it: {value!r}.")
    return f"{key}={value}\n"


def auto_problem(said: Mapping[str, Any]) -> str:
    """Why this is no model that a node may choose for all others; '' where it is one. said: by `aura plan --json`."""
    words = [said["preset"], *said["settings"], *said["settings"].values()]
    strange = [word for word in words if not re.fullmatch(r"[\w.+-]{0,60}", str(word), re.ASCII)]
    return f"this is no model: {strange[0]!r}." if strange else ""


def step_tokens(said: Sequence[str], overrides: Mapping[str, Any]) -> int:
    """Of a step of the run, as it was trained last; 0 where the request names it itself, or nobody knows.

    said: of each node its model_config.json and when that was written, or nothing.
    """
    if "global_batch_tokens" in {name.replace("-", "_") for name in overrides}:
        return 0
    newest: dict[str, Any] = max(map(_record, said), key=lambda one: one["written"], default=NO_RECORD)
    return int(newest["model"].get("step_tokens", 0))


def _record(said: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(said)
    except ValueError:  # there is none, or a power cut has left half of it
        return NO_RECORD
    return record


def still_active(nodes: Iterable[Mapping[str, Any]]) -> bool:
    """nodes: what roles/trainer/tasks/status.yml has set for each.

    A node that does not answer is not waited for: whoever wants to know looks again when it is back. Nor is a rank that
    came back when the others had done all.
    """
    answering = [node for node in nodes if node["trainer_answers"]]
    ranks = [rank for node in answering for rank in node["trainer_status"]]
    late = any(rank.get("state") == "done" for rank in ranks)
    return any(node["script_status"].get("active") for node in answering) or any(
        rank["unit"]["ActiveState"] not in ENDED and not (late and rank.get("state") == "joining")
        for rank in ranks
    )


def image_content(inspected: str) -> str:
    """A name for what is in an image and what it starts, from `docker image inspect`; "" without an image.

    Docker's older store calls an image by its settings, containerd's (the default of Docker 29) by its manifest.
    """
    found: list[dict[str, Any]] = json.loads(inspected or "[]")
    if not found:
        return ""
    settings = found[0]["Config"]
    parts = [found[0]["RootFS"]["Layers"], settings.get("Env"), settings.get("Entrypoint")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "auto_problem": auto_problem,
            "gang_member": gang_member,
            "gang_problems": gang_problems,
            "gang_words": gang_words,
            "image_content": image_content,
            "rank_files": rank_files,
            "sizing": sizing,
            "step_tokens": step_tokens,
            "still_active": still_active,
        }
