"""A change of the network that cuts us off goes away by itself, by the guest's own timer, and after a power cut.

The program is the one that roles/safe_change installs; the roles use it the same way.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machines import Machine, wait_for

ROLE = Path(__file__).resolve().parents[2] / "roles/safe_change/files"
PROGRAM = "/usr/local/lib/aura/safe-change"
SECONDS = 25  # until the guest takes it back

FIREWALL = "/etc/aura-firewall.nft"
SSHD = "/etc/ssh/sshd_config.d/10-aura.conf"


def netplan(machine: Machine, address: str, gateway: str) -> dict[str, Any]:
    card = machine.exec("ip -o route show default | awk '{print $5; exit}'").strip()
    text = {
        "network": {
            "version": 2,
            "ethernets": {
                "0-aura": {
                    "match": {"macaddress": machine.mac},
                    "set-name": card,
                    "dhcp4": False,
                    "addresses": [address],
                    "routes": [{"to": "default", "via": gateway, "on-link": True}],
                }
            },
        }
    }
    # JSON is YAML.
    return {"path": "/etc/netplan/00-aura.yaml", "content": json.dumps(text), "mode": "0600"}


def wrong_address(machine: Machine) -> dict[str, Any]:
    return {"files": [netplan(machine, "203.0.113.9/24", "203.0.113.1")], "apply": [["netplan", "apply"]]}


def wrong_gateway(machine: Machine) -> dict[str, Any]:
    return {
        "files": [netplan(machine, f"{machine.address}/24", "198.18.50.254")],
        "apply": [["netplan", "apply"]],
    }


def wrong_address_of_network_manager(machine: Machine) -> dict[str, Any]:
    """As roles/static_network does it where NetworkManager has the card."""
    file = netplan(machine, "203.0.113.9/24", "203.0.113.1")
    text = json.loads(file["content"])
    card = text["network"]["ethernets"]["0-aura"].pop("set-name")
    text["network"]["ethernets"]["0-aura"]["renderer"] = "NetworkManager"
    load = "netplan generate && nmcli connection reload &&"
    return {
        "files": [{**file, "content": json.dumps(text)}],
        "directories": ["/etc/netplan", "/etc/NetworkManager/system-connections"],
        "apply": [["sh", "-c", f"{load} exec nmcli --wait 30 connection up netplan-0-aura"]],
        "undo": [["sh", "-c", f"{load} exec nmcli --wait 30 device connect {card}"]],
    }


def plan(change: dict[str, Any]) -> dict[str, Any]:
    whole = {
        "of": "a test",
        "seconds": SECONDS,
        "directories": [],
        "check": "",
        "undo": change["apply"],
    } | change
    if not whole["directories"] and any(file["path"].startswith("/etc/netplan") for file in whole["files"]):
        whole["directories"] = ["/etc/netplan"]
    return whole


def put(machine: Machine, path: str, content: bytes, mode: str) -> None:
    coded = base64.b64encode(content).decode()
    machine.exec(f"mkdir -p $(dirname {path}); echo {coded} | base64 -d >{path}; chmod {mode} {path}")


def begin(machine: Machine, change: dict[str, Any]) -> str:
    words = shlex.quote(json.dumps(plan(change)))
    answer: dict[str, str] = json.loads(machine.exec(f"printf %s {words} | {PROGRAM} begin"))
    return answer["id"]


def status(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machine.exec(f"{PROGRAM} status"))
    return found


def files(machine: Machine) -> str:
    """What the machine's settings are, and that nothing is left of a change."""
    return machine.exec(f"""
        sha256sum /etc/netplan/* {FIREWALL} {SSHD} 2>/dev/null
        nft list tables 2>/dev/null
        ls -A /var/lib/aura-safe-change/current 2>/dev/null
        systemctl list-units --all --no-legend --plain 'aura-safe-change-*'
        sshd -T | grep -E '^(pubkey|password)auth'
        ip -4 -o addr show scope global | awk '{{print $2, $4}}'
        ip route show default | awk '{{print $3}}'
        true
    """)


def prepared(node: Machine) -> Machine:
    """roles/safe_change has been there, and its owner reaches it by ssh."""
    put(node, PROGRAM, (ROLE / "safe-change").read_bytes(), "0755")
    put(
        node,
        "/etc/systemd/system/aura-safe-change.service",
        (ROLE / "aura-safe-change.service").read_bytes(),
        "0644",
    )
    node.exec("systemctl daemon-reload; systemctl -q enable aura-safe-change.service; sync")
    node.wait_ssh()
    return node


@pytest.fixture
def machine(vm: Callable[..., Machine]) -> Machine:
    return prepared(vm())


def applied(machine: Machine, change: dict[str, Any], before: str) -> tuple[str, int]:
    """Begins the change and sees it; its id, and the seconds until the guest takes it back. On a busy machine it may
    be gone before anybody has looked: then it gets more time."""
    for seconds in (SECONDS, 4 * SECONDS, 16 * SECONDS):
        identity = begin(machine, change | {"seconds": seconds})

        def is_over() -> bool:
            current = status(machine)["current"]
            return current is None or current["state"] == "applied"

        wait_for("it is applied", is_over, seconds + 120)
        if files(machine) != before and status(machine)["current"]:
            return identity, seconds
        wait_for("everything is as it was", lambda: files(machine) == before, seconds + 120)
    raise AssertionError(f"nobody saw it within {seconds} s")


CHANGES = [wrong_address, wrong_gateway]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_comes_back_by_itself(machine: Machine, change: Callable[[Machine], dict[str, Any]]) -> None:
    before = files(machine)
    identity, seconds = applied(machine, change(machine), before)
    # Nobody comes.
    wait_for("the machine takes it back", lambda: status(machine)["current"] is None, seconds + 120)
    assert status(machine)["last"]["id"] == identity
    assert status(machine)["last"]["outcome"] == "undone"
    wait_for("everything is as it was", lambda: files(machine) == before, 60)
    machine.wait_ssh()


def comes_back_after_a_power_cut(machine: Machine, change: dict[str, Any]) -> None:
    before = files(machine)
    begin(machine, change | {"seconds": 600})
    wait_for("it is applied", lambda: (status(machine)["current"] or {}).get("state") == "applied", 120)
    assert files(machine) != before
    machine.power_off()
    machine.power_on()
    machine.wait_ssh()
    assert status(machine)["current"] is None
    assert "switched off" in status(machine)["last"]["why"]
    wait_for("everything is as it was", lambda: files(machine) == before, 60)


# A gateway is in the same file as an address: one of the two at a time.
@pytest.mark.parametrize(
    "network",
    [wrong_address, pytest.param(wrong_gateway, marks=pytest.mark.more)],
    ids=lambda change: change.__name__,
)
def test_it_comes_back_after_the_power_went_in_the_middle(
    machine: Machine, network: Callable[[Machine], dict[str, Any]]
) -> None:
    comes_back_after_a_power_cut(machine, network(machine))


def test_a_card_of_network_manager_comes_back_after_the_power_went(vm: Callable[..., Machine]) -> None:
    machine = vm("desktop")
    machine.wait_inside("nmcli --terse --fields TYPE,STATE device | grep -q ethernet:connected")
    prepared(machine)
    comes_back_after_a_power_cut(machine, wrong_address_of_network_manager(machine))
    assert "ethernet:connected" in machine.exec("nmcli --terse --fields TYPE,STATE device")
    assert "netplan-0-aura" not in machine.exec("nmcli --terse --fields NAME connection show")


def test_what_was_confirmed_stays_and_leaves_nothing_behind(machine: Machine) -> None:
    identity = begin(machine, {
        "files": [{"path": SSHD, "content": "MaxAuthTries 3\n", "mode": "0600"}],
        "apply": [["systemctl", "reload", "ssh"]],
    })  # fmt: skip
    machine.exec(f"{PROGRAM} reached {identity}; {PROGRAM} confirm {identity}")
    machine.power_off()
    machine.power_on()
    machine.wait_ssh()
    assert status(machine)["current"] is None
    assert "maxauthtries 3" in machine.exec("sshd -T")
    assert "aura-safe-change-" not in machine.exec(
        "systemctl list-units --all --no-legend --plain; ls /var/lib/aura-safe-change"
    )
