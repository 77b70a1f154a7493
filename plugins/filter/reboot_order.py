"""Which nodes may be restarted from afar, what a person is asked and told about the others, and when ranks are back.

A node is given by its variables, with the facts `env` (setup) and `boot` (modules/boot_facts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Node = Mapping[str, Any]
Rank = Mapping[str, Any]  # as rank-status prints it

SCRIPT = "aura-script.service"


def is_controller(node: Node) -> bool:
    """Whether this is the controller's own machine: it is reached without SSH, or from its own address."""
    words = str(node["ansible_facts"]["env"].get("SSH_CONNECTION", "")).split()
    return len(words) < 3 or words[0] == words[2]


def needs_console(boot: Mapping[str, Any]) -> tuple[str, str]:
    """Why a person has to sit at the PC when it restarts ("" where nobody has to), and what they type there."""
    if boot["wsl"]:
        # What runs in it all the time ends with it, and comes back at the next logon only.
        again = "in PowerShell there: wsl --shutdown; Start-ScheduledTask -TaskName 'Aura WSL'"
        return "it is Linux under Windows (WSL), and only Windows starts it again", again
    if boot["live"]:
        why = "it runs a live system (from a USB stick, say), which forgets at a restart what was installed"
        return why, "what installs Ubuntu on its disk"
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


def reboot_blockers(nodes: Iterable[Node], upgrade: bool = False) -> list[str]:
    """A sentence for each thing that keeps these nodes from being rebooted or upgraded one after the other.

    A person at the controller reboots that one. reboot_units of each: the lines of systemctl about its units.
    """
    sentences = []
    for node in nodes:
        boot, name = node["ansible_facts"]["boot"], node["inventory_hostname"]
        waits = boot["reboot_required"] or any(not one["held"] for one in node.get("reboot_upgrades", []))
        why, command = needs_console(boot)
        if why and not is_controller(node) and (waits or not upgrade):
            then = " && " if command.startswith("sudo") else ", then "
            before = f"sudo apt-get --with-new-pkgs upgrade{then}" if upgrade else ""
            sentences.append(
                f"{name}: {why}. Sit down at it and type: {before}{command}. The others without it: --limit "
                f"'cluster:!{name}'."
            )
        if SCRIPT in node["reboot_units"]["stdout"]:
            sentences.append(
                f"A script runs on {name}, and a reboot would end it. Wait for its end, or stop it: ansible-playbook "
                "playbooks/stop.yml"
            )
    return sentences


def may_restart(node: Node) -> str:
    """Whether a node may be restarted for its driver: `true`, `false` or `ask`."""
    return str(node.get("reboot", node.get("nvidia_driver_reboot", "ask"))).lower()


def decision_of(node: Node) -> dict[str, Any]:
    """What the filter driver_decision has said of it, where it has."""
    return {"action": "none", **node.get("nvidia_driver_decision", {})}


def restart_question(nodes: Iterable[Node]) -> str:
    """What a person is asked before anything is changed; "" where there is nothing to ask."""
    names = [
        f"{node['inventory_hostname']} ({decision_of(node)['why']})"
        for node in nodes
        if decision_of(node)["action"] in ("install", "restart")
        and may_restart(node) not in ("true", "false")
        and not is_controller(node)
        and not needs_console(node["ansible_facts"]["boot"])[0]
    ]
    return (
        f"For their NVIDIA driver these nodes have to be restarted, or may have to be: {', '.join(names)}.\n"
        "All else is done first. Then they restart one after the other, and each is proved before the next.\n"
        "May they be restarted at the end?"
        if names
        else ""
    )


def plan_restarts(nodes: Iterable[Node]) -> dict[str, Any]:
    """Of the nodes whose driver waits for a restart: `now`, the names of those that restart, and `manual`, by the name
    of each other one, what a person does.
    """
    now: list[str] = []
    manual: dict[str, str] = {}
    for node in nodes:
        name, decision = node["inventory_hostname"], decision_of(node)
        if decision["action"] != "restart":
            continue
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


def ranks_waited_for(before: Iterable[Rank], now: Iterable[Rank]) -> int:
    """How many of a node's ranks have neither done a step in a new attempt nor come to the run's end."""
    # A rank alone gives its attempts no name: then its process tells them apart.
    attempts = [tuple(rank["status"].get(word) for word in ("attempt", "pid", "begun")) for rank in before]
    left = len(attempts)
    for status in (rank["status"] for rank in now):
        trains = status.get("state") in ("training", "saving") and status.get("loss") is not None
        again = tuple(status.get(word) for word in ("attempt", "pid", "begun")) not in attempts
        left -= status.get("state") == "done" or (trains and again)
    return left


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "is_controller": is_controller,
            "plan_restarts": plan_restarts,
            "ranks_waited_for": ranks_waited_for,
            "reboot_blockers": reboot_blockers,
            "restart_question": restart_question,
        }
