"""Which nodes may be restarted from afar, what a person is asked and told about the others, and when ranks are back.

A node is given by its variables, with the facts `env` (setup) and `boot` (modules/boot_facts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Node = Mapping[str, Any]
Rank = Mapping[str, Any]  # as rank-status prints it

SCRIPT = "aura-script.service"
# What runs in it all the time ends with it, and comes back at the next logon only.
WSL_AGAIN = "wsl --shutdown; Start-ScheduledTask -TaskName 'Aura WSL'"


def is_controller(node: Node) -> bool:
    """Whether this is the controller's own machine: it is reached without SSH, or from its own address."""
    words = str(node["ansible_facts"]["env"].get("SSH_CONNECTION", "")).split()
    return len(words) < 3 or words[0] == words[2]


def needs_console(boot: Mapping[str, Any]) -> tuple[str, str]:
    """Why a person has to sit at the PC when it restarts ("" where nobody has to), and what they type there."""
    if boot["passphrase"]:
        why = "one of its disks asks for a passphrase when it starts, so it would not come back by itself"
        return why, "sudo reboot"
    if boot["windows"] == "firmware":
        why = "its firmware starts Windows before this system, so it would come back in Windows"
        return why, f"sudo efibootmgr --bootnext {boot['boot_entry']} && sudo reboot"
    if boot["windows"] == "GRUB":
        why = "its boot menu (GRUB) starts Windows by itself, so it would come back in Windows"
        return why, "sudo grub-reboot 0 && sudo reboot"
    return "", "sudo reboot"


def reboot_blocker(node: Node, upgrade: bool = False) -> str:
    """Why a node must not be rebooted (upgrade: be upgraded, which may reboot it) from afar; "" where it may.

    A person at the controller reboots that one.
    """
    boot, name = node["ansible_facts"]["boot"], node["inventory_hostname"]
    waits = boot["reboot_required"] or any(not one["held"] for one in node.get("reboot_upgrades", []))
    if is_controller(node) or (upgrade and not waits):
        return ""
    others = f"The others without it: --limit 'cluster:!{name}'."
    if boot["wsl"]:
        before = "sudo apt-get --with-new-pkgs upgrade in its Ubuntu, then " if upgrade else ""
        return (
            f"{name} is Linux under Windows (WSL), and only Windows starts it again. Sit down at it and type: "
            f"{before}in PowerShell there: {WSL_AGAIN}. {others}"
        )
    if boot["live"]:
        return (
            f"{name} runs a live system (from a USB stick, say): after a reboot nothing of what was installed there "
            f"is left, this controller's key neither. Install its system on its disk. {others}"
        )
    why, command = needs_console(boot)
    before = "sudo apt-get --with-new-pkgs upgrade && " if upgrade else ""
    return f"{name}: {why}. Sit down at it and type: {before}{command}. {others}" if why else ""


def reboot_blockers(nodes: Iterable[Node], upgrade: bool = False) -> list[str]:
    """A sentence for each thing that keeps these nodes from being rebooted or upgraded one after the other.

    reboot_units, a variable of each: the lines of systemctl about its units.
    """
    sentences = []
    for node in nodes:
        sentences.append(reboot_blocker(node, upgrade))
        if SCRIPT in node["reboot_units"]["stdout"]:
            sentences.append(
                f"A script runs on {node['inventory_hostname']}, and a reboot would end it. Wait for its end, or stop "
                "it: ansible-playbook playbooks/stop.yml"
            )
    return [sentence for sentence in sentences if sentence]


def may_restart(node: Node) -> str:
    """Whether a node may be restarted for its driver: `true`, `false` or `ask`."""
    return str(node.get("reboot", node.get("nvidia_driver_reboot", "ask"))).lower()


def with_driver_action(nodes: Iterable[Node], *actions: str) -> list[tuple[Node, Mapping[str, Any]]]:
    """The nodes whose driver needs one of these actions, each with its decision (filter driver_decision)."""
    decisions = [(node, node.get("nvidia_driver_decision", {})) for node in nodes]
    return [(node, decision) for node, decision in decisions if decision.get("action") in actions]


def restart_question(nodes: Iterable[Node]) -> str:
    """What a person is asked before anything is changed; "" where there is nothing to ask."""
    names = [
        f"{node['inventory_hostname']} ({decision['why']})"
        for node, decision in with_driver_action(nodes, "install", "restart")
        if may_restart(node) not in ("true", "false")
        and not is_controller(node)
        and not needs_console(node["ansible_facts"]["boot"])[0]
    ]
    if not names:
        return ""
    return (
        f"For their NVIDIA driver these nodes have to be restarted, or may have to be: {', '.join(names)}.\n"
        "All else is done first. Then they restart one after the other, and each is proved before the next.\n"
        "May they be restarted at the end?"
    )


def plan_restarts(nodes: Iterable[Node]) -> dict[str, Any]:
    """Of the nodes whose driver waits for a restart: `now`, the names of those that restart, and `manual`, by the name
    of each other one, what a person does.
    """
    now: list[str] = []
    manual: dict[str, str] = {}
    for node, decision in with_driver_action(nodes, "restart"):
        name = node["inventory_hostname"]
        why, command = needs_console(node["ansible_facts"]["boot"])
        if is_controller(node):
            what = f"is this machine, which is not restarted from here. Type: {command}"
        elif SCRIPT in decision["runs"]:
            what = f"runs a script, which would not go on. When it is through, type on it: {command}"
        elif why:
            what = f"waits for somebody: {why}. Sit down at it and type: {command}"
        elif may_restart(node) != "true":
            what = f"may not be restarted from here. Type on it: {command}"
        else:
            now.append(name)
            continue
        manual[name] = f"{name} {what}   ({decision['why']})"
    return {"now": now, "manual": manual}


def ranks_of_run(ranks: Iterable[Rank]) -> list[Rank]:
    """Those of a node's ranks that take part in a run, or did before an upgrade that has failed.

    Who is stopped for an upgrade still starts at boot; stop.yml ends that too. What is done or has failed stays so.
    """

    def stopped(rank: Rank) -> bool:
        enabled = rank["unit"].get("UnitFileState") == "enabled"
        inactive = rank["unit"]["ActiveState"] in ("inactive", "deactivating")
        return enabled and inactive and rank["state"] not in ("done", "failed")

    return [
        rank for rank in ranks if rank["unit"]["ActiveState"] in ("active", "activating") or stopped(rank)
    ]


def attempt_of(status: Mapping[str, Any]) -> tuple[Any, ...]:
    """A rank alone gives its attempts no name: then its process tells them apart."""
    return tuple(status.get(name) for name in ("attempt", "pid", "begun"))


def ranks_waited_for(before: Iterable[Rank], now: Iterable[Rank]) -> int:
    """How many of a node's ranks have neither done a step in a new attempt nor come to the run's end."""
    ranks = list(before)
    attempts = {attempt_of(rank["status"]) for rank in ranks}
    statuses = [rank["status"] for rank in now if "state" in rank["status"]]
    back = [
        status
        for status in statuses
        if status["state"] == "done"
        or (
            status["state"] in ("training", "saving")
            and status.get("loss") is not None
            and attempt_of(status) not in attempts
        )
    ]
    return len(ranks) - len(back)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "is_controller": is_controller,
            "plan_restarts": plan_restarts,
            "ranks_of_run": ranks_of_run,
            "ranks_waited_for": ranks_waited_for,
            "reboot_blockers": reboot_blockers,
            "restart_question": restart_question,
        }
