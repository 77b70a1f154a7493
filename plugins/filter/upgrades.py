"""Whether an upgrade or a reboot may be made, from what apt would do and what the node is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Upgrade = Mapping[str, object]  # as node_state says it

PREBUILT = re.compile(r"linux-modules-nvidia-")
KERNEL = re.compile(r"linux-image-(?:unsigned-)?(\d.*)")

# What runs in it all the time ends with it, and comes back at the next logon only.
WSL_AGAIN = "wsl --shutdown; Start-ScheduledTask -TaskName 'Aura WSL'"


def kernels_without_driver(upgrades: Iterable[Upgrade], installed: Iterable[str]) -> list[str]:
    """The new kernels for which this upgrade brings no NVIDIA module, on a node that has its driver as prebuilt ones.

    Only what moves counts: a kernel that is held does not come, and a module that is held does not come with it.
    installed: names of packages; with a dkms package, modules are built as needed.
    """
    moves = [one for one in upgrades if not one["held"]]
    names = [str(one["package"]) for one in moves]
    packages = list(installed)
    if not any(map(PREBUILT.match, packages)) or any(name.startswith("nvidia-dkms-") for name in packages):
        return []
    new = [
        found[1] for one in moves if not one["installed"] and (found := KERNEL.fullmatch(str(one["package"])))
    ]
    modules = [name for name in [*names, *packages] if PREBUILT.match(name)]
    return [kernel for kernel in new if not any(name.endswith(f"-{kernel}") for name in modules)]


def moved(before: Iterable[Upgrade], after: Iterable[Upgrade]) -> list[str]:
    """The packages that an upgrade has moved: what waited before it, and neither was held nor waits after it."""
    left = {one["package"] for one in after}
    return [str(one["package"]) for one in before if not one["held"] and one["package"] not in left]


def no_return(seen: Mapping[str, Any], node: str, upgrade: bool = False) -> str:
    """Why this node must not be rebooted (upgrade: be upgraded, which may reboot it) from afar: empty when it may.

    seen: the answer of node_state. The controller's own node is rebooted by a person, who sits at it.
    """
    # A session has the same address at both ends, or there is none: the controller is this node.
    is_own = seen["session"]["client"] == seen["session"]["here"]
    waits = seen["reboot_required"] or any(not one["held"] for one in seen["upgrades"])
    if is_own or (upgrade and not waits):
        return ""
    others = f"The others without it: --limit 'cluster:!{node}'."
    if seen["wsl"]:
        type_there = "sudo apt-get --with-new-pkgs upgrade in its Ubuntu, then " if upgrade else ""
        return (
            f"{node} is Linux under Windows (WSL), and only Windows starts it again. Sit down at it and type: "
            f"{type_there}in PowerShell there: {WSL_AGAIN}. {others}"
        )
    if seen["start"]["live"]:
        return (
            f"{node} runs a live system (from a USB stick, say): after a reboot nothing of what was installed there "
            f"is left, this controller's key neither. Install its system on its disk. {others}"
        )
    why, type_there = at_the_pc(seen["start"])
    before = "sudo apt-get --with-new-pkgs upgrade && " if upgrade else ""
    return f"{node}: {why}. Sit down at it and type: {before}{type_there}. {others}" if why else ""


def no_returns(nodes: Iterable[Mapping[str, Any]], upgrade: bool = False) -> list[str]:
    """What keeps these nodes (their variables) from being rebooted or upgraded one after the other."""
    said = []
    for node in nodes:
        name = node["inventory_hostname"]
        said.append(no_return(node["turn_seen"], name, upgrade))
        if node["turn_seen"]["units"]["aura-script.service"]["active"]:
            said.append(
                f"A script runs on {name}, and a reboot would end it. Wait for its end, or stop it: "
                "ansible-playbook playbooks/stop.yml"
            )
    return [sentence for sentence in said if sentence]


def ranks_of_run(ranks: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of a node's ranks (rank-status) that take part in a run, or did before an upgrade that has failed.

    Who is stopped for an upgrade still starts at boot; stop.yml ends that too. What is done or has failed stays so.
    """

    def left(rank: Mapping[str, Any]) -> bool:
        enabled = rank["unit"].get("UnitFileState") == "enabled"
        return (
            enabled
            and rank["unit"]["ActiveState"] in ("inactive", "deactivating")
            and rank["state"] not in ("done", "failed")
        )

    return [rank for rank in ranks if rank["unit"]["ActiveState"] in ("active", "activating") or left(rank)]


def attempt_of(status: Mapping[str, Any]) -> tuple[Any, ...]:
    """A rank alone gives its attempts no name: then its process tells them apart."""
    return tuple(status.get(name) for name in ("attempt", "pid", "begun"))


def ranks_waited_for(before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]) -> int:
    """How many of a node's ranks (rank-status) have neither done a step in a new attempt nor come to the run's end."""
    ranks = list(before)
    attempts = {attempt_of(rank["status"]) for rank in ranks}
    told = [rank["status"] for rank in now if "state" in rank["status"]]
    done = [status for status in told if status["state"] == "done"]
    training = [
        status
        for status in told
        if status["state"] in ("training", "saving")
        and status.get("loss") is not None
        and attempt_of(status) not in attempts
    ]
    return len(ranks) - len(done) - len(training)


def at_the_pc(start: Mapping[str, Any]) -> tuple[str, str]:
    """Why somebody has to sit at this PC when it restarts (empty: nobody has to), and what to type there."""
    if start["passphrase"]:
        return (
            "one of its disks asks for a passphrase when it starts, so it would not come back by itself",
            "sudo reboot",
        )
    if start["windows"] == "firmware":
        entry = start["boot_entry"]
        return (
            "its firmware starts Windows before this system, so it would come back in Windows",
            f"sudo efibootmgr --bootnext {entry} && sudo reboot",
        )
    if start["windows"] == "GRUB":
        return (
            "its boot menu (GRUB) starts Windows by itself, so it would come back in Windows",
            "sudo grub-reboot 0 && sudo reboot",
        )
    return "", "sudo reboot"


Node = Mapping[str, Any]  # its variables


def waiting(nodes: Iterable[Node], *actions: str) -> list[tuple[Node, Node]]:
    """The nodes for whose driver one of these things is to be done, and what was decided (driver_decision)."""
    of = [(node, node.get("nvidia_driver_decision", {})) for node in nodes]
    return [(node, decision) for node, decision in of if decision.get("action") in actions]


def told(node: Node) -> str:
    """Whether it may be restarted for its driver: `true`, `false` or `ask`."""
    return str(node.get("reboot", node.get("nvidia_driver_reboot", "ask"))).lower()


def restart_question(nodes: Iterable[Node]) -> str:
    """What a person is asked before anything is changed; empty when no node may have to be restarted, or it is said of
    all that do."""
    names = [
        f"{node['inventory_hostname']} ({decision['why']})"
        for node, decision in waiting(nodes, "install", "restart")
        if told(node) not in ("true", "false") and not decision["own"] and not at_the_pc(decision["start"])[0]
    ]
    if not names:
        return ""
    return (
        f"For their NVIDIA driver these nodes have to be restarted, or may have to be: {', '.join(names)}.\n"
        "All else is done first. Then they restart one after the other, and each is proved before the next.\n"
        "May they be restarted at the end?"
    )


def restarts(nodes: Iterable[Node]) -> dict[str, Any]:
    """Of the nodes whose driver waits for a restart: `now`, those that may be restarted, and `said`, by the name of
    each other one, what a person does.
    """
    now: list[str] = []
    said: dict[str, str] = {}
    for node, decision in waiting(nodes, "restart"):
        name = node["inventory_hostname"]
        why, type_there = at_the_pc(decision["start"])
        if decision["own"]:
            said[name] = f"is this machine, which is not restarted from here. Type: {type_there}"
        elif decision["script"]:
            said[name] = f"runs a script, which would not go on. When it is through, type on it: {type_there}"
        elif why:
            said[name] = f"waits for somebody: {why}. Sit down at it and type: {type_there}"
        elif told(node) == "true":
            now.append(name)
        else:
            said[name] = f"may not be restarted from here. Type on it: {type_there}"
        if name in said:
            said[name] = f"{name} {said[name]}   ({decision['why']})"
    return {"now": now, "said": said}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "kernels_without_driver": kernels_without_driver,
            "moved": moved,
            "no_returns": no_returns,
            "ranks_of_run": ranks_of_run,
            "ranks_waited_for": ranks_waited_for,
            "restart_question": restart_question,
            "restarts": restarts,
        }
