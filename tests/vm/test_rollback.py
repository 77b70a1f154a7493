"""A change of network, firewall or SSH that cuts us off goes away by itself, by a timer and after a power cut.

The script is the one that roles/rollback installs; the roles use it the same way.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from machines import Machine, answers, wait_for

ROLE = Path(__file__).resolve().parents[2] / "roles/rollback/files"
SCRIPT = "/usr/local/sbin/aura-rollback"
UNIT = "/etc/systemd/system/aura-rollback.service"
RULES = "/etc/aura-firewall.nft"
SSHD = "/etc/ssh/sshd_config.d/10-aura.conf"


@dataclass(frozen=True)
class Change:
    """A file, what activates it, new or old, and what has to run before."""

    path: str
    text: str
    command: str
    before: str = "true"


# Connections from before live on, as in the role.
CLOSED = Change(
    RULES,
    "table inet aura {\n chain input {\n type filter hook input priority 0; policy drop;\n"
    " ct state established accept;\n }\n}\n",
    f"if [ -e {RULES} ]; then nft -f {RULES}; else nft delete table inet aura; fi",
)
KEYLESS = Change(SSHD, "PubkeyAuthentication no\nPasswordAuthentication no\n", "systemctl restart ssh")
# sshd ends at its reload, because somebody else has the port.
ENDS = Change(
    SSHD, "Port 2222\n", "systemctl reload-or-restart ssh", "systemd-run --quiet python3 -m http.server 2222"
)


def netplan(machine: Machine, address: str, gateway: str, renderer: str = "networkd") -> Change:
    """As roles/network does it, but wrong."""
    card = machine.exec("ip -o route show default | awk '{print $5; exit}'").strip()
    settings = {"addresses": [address], "routes": [{"to": "default", "via": gateway, "on-link": True}]}
    match = {"match": {"macaddress": machine.mac}, "renderer": renderer, "dhcp4": False}
    text = {"network": {"version": 2, "ethernets": {"0-aura": match | settings}}}
    command = f"netplan generate && networkctl reload && networkctl reconfigure {card}"
    if renderer == "NetworkManager":
        load = "netplan generate && nmcli connection reload"
        command = f"{load} && (nmcli connection up netplan-0-aura || nmcli device connect {card})"
    return Change("/etc/netplan/00-aura.yaml", json.dumps(text), command)  # JSON is YAML


def put(machine: Machine, path: str, content: bytes, mode: str = "0644") -> None:
    coded = base64.b64encode(content).decode()
    machine.exec(f"echo {coded} | base64 -d >{path}; chmod {mode} {path}")


def begin(machine: Machine, seconds: int, *changes: Change) -> None:
    command = shlex.quote("; ".join(change.command for change in changes))
    paths = " ".join(change.path for change in changes)
    machine.exec(f"{SCRIPT} arm {seconds} {command} {paths}")
    for change in changes:
        machine.exec(change.before)
        put(machine, change.path, change.text.encode())
    machine.exec(f"{SCRIPT} apply")


def state(machine: Machine) -> str:
    """What the machine's settings are, and that nothing is pending."""
    return machine.exec(f"""
        sha256sum /etc/netplan/* {RULES} {SSHD} 2>/dev/null
        nft list tables 2>/dev/null
        find /var/lib/aura-rollback -mindepth 1 -type d 2>/dev/null
        sshd -T | grep -E '^(pubkey|password)auth|^port'
        ip -4 -o addr show scope global | awk '{{print $2, $4}}'
        ip route show default | awk '{{print $3}}'
        true
    """)


def prepared(node: Machine) -> Machine:
    """roles/rollback has been there, and its owner reaches it by ssh."""
    put(node, SCRIPT, (ROLE / "aura-rollback").read_bytes(), "0755")
    put(node, UNIT, (ROLE / "aura-rollback.service").read_bytes())
    node.exec("systemctl daemon-reload; systemctl -q enable aura-rollback.service; sync")
    node.wait_ssh()
    return node


@pytest.fixture
def machine(vm: Callable[..., Machine]) -> Machine:
    return prepared(vm())


CHANGES: dict[str, Callable[[Machine], Change]] = {
    "address": lambda machine: netplan(machine, "203.0.113.9/24", "203.0.113.1"),
    "gateway": lambda machine: netplan(machine, f"{machine.address}/24", "198.18.50.254"),
    "rules": lambda _: CLOSED,
    "keys": lambda _: KEYLESS,
    "port": lambda _: ENDS,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_timer_restores_the_old_files(machine: Machine, change: Callable[[Machine], Change]) -> None:
    before = state(machine)
    begin(machine, 60, change(machine))
    wait_for("it is active", lambda: state(machine) != before, 50)
    try:
        wait_for("the machine takes it back", lambda: state(machine) == before, 240)
    except AssertionError as late:
        script = f"{SCRIPT} status; journalctl --no-pager --lines=60 --unit='aura-rollback*' --unit=systemd-networkd"
        raise AssertionError(f"{late}\n{before}\nand now\n{state(machine)}\n{machine.exec(script)}") from late
    wait_for("somebody gets in", lambda: answers(machine.address), 60)


def come_back_after_a_power_cut(machine: Machine, *changes: Change) -> None:
    before = state(machine)
    begin(machine, 600, *changes)
    wait_for("nobody gets in", lambda: not answers(machine.address), 120)
    machine.power_off()
    machine.power_on()
    machine.wait_ssh()
    wait_for("everything is as it was", lambda: state(machine) == before, 60)
    assert "switched off" in machine.exec(f"{SCRIPT} status")


def test_a_power_cut_restores_the_old_files(machine: Machine) -> None:
    """Network, rules and SSH at once: none of them is there when the machine has booted."""
    come_back_after_a_power_cut(machine, CHANGES["address"](machine), CLOSED, KEYLESS)


def test_a_power_cut_restores_a_card_of_network_manager(vm: Callable[..., Machine]) -> None:
    machine = vm("desktop")
    machine.wait_inside("nmcli --terse --fields TYPE,STATE device | grep -q ethernet:connected")
    prepared(machine)
    come_back_after_a_power_cut(machine, netplan(machine, "203.0.113.9/24", "203.0.113.1", "NetworkManager"))
    assert "netplan-0-aura" not in machine.exec("nmcli --terse --fields NAME connection show")


def test_what_was_confirmed_stays(machine: Machine) -> None:
    begin(machine, 600, Change(SSHD, "MaxAuthTries 3\n", "systemctl reload ssh"))
    machine.exec(f"{SCRIPT} wait && {SCRIPT} confirm")
    machine.power_off()
    machine.power_on()
    machine.wait_ssh()
    assert "maxauthtries 3" in machine.exec("sshd -T")
    assert machine.exec("systemctl list-units --all --no-legend 'aura-rollback-*'") == ""
