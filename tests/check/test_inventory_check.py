"""What is said of an inventory that cannot be right, before the first packet: all of it at once."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from plays import playbook

TWO = {name: {"first_user": "ada", "lan_address": f"198.18.50.16{name[-1]}"} for name in ("check0", "check1")}
TABLE = "192.168.50.0/24"


def checked(
    place: Path, nodes: dict[str, Any], wsl: tuple[str, ...] = (), **settings: Any
) -> tuple[int, str]:
    """What playbooks/inventory_check.yml says of this hosts.yml; nobody has seen its nodes yet."""
    groups = {"cluster": {"hosts": nodes}} | ({"wsl": {"hosts": dict.fromkeys(wsl)}} if wsl else {})
    (place / "hosts.yml").write_text(json.dumps(groups))
    (place / "group_vars").symlink_to(tree.ROOT / "inventory/lan/group_vars")
    given = json.dumps({"inventory_check_bootstrapped": False, "lan_gateway": ""} | settings)
    done = playbook("-i", place / "hosts.yml", "playbooks/inventory_check.yml", "-e", given)
    return done.returncode, " ".join(done.stdout.split())


def test_an_inventory_that_is_right_is_accepted(tmp_path: Path) -> None:
    key = base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes(32)).decode()
    (tmp_path / "mine.pub").write_text(f"ssh-ed25519 {key} me@laptop\n")
    given = {"ssh_second_key": str(tmp_path / "mine.pub"), "shared_directory": "/srv/aura"}
    code, said = checked(tmp_path, TWO, wsl=("check1",), **given)
    assert code == 0 and "2 nodes" in said, said


# What is wrong with a node, and what is said of it.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "7": ({}, "7 cannot be a hostname"),
    "0x1f": ({}, "0x1f cannot be a hostname"),
    "check_2": ({}, "check_2 cannot be a hostname"),
    "same": ({"lan_address": "198.18.50.160"}, "same and check0 have the same lan_address 198.18.50.160"),
    "elsewhere": ({"lan_address": "198.18.51.162"}, "The nodes are not in one network"),
    "network": ({"lan_address": "198.18.50.0"}, "198.18.50.0 means all of 198.18.50.0/24"),
    "again": ({"first_address": "198.18.50.190"}, "again and twice have the same first_address 198.18.50.190"),
    "twice": ({"first_address": "198.18.50.190"}, "twice and again have the same first_address"),
    "long": ({"lan_address": "198.18.50.240.1"}, "'198.18.50.240.1', which is not an IPv4 address"),
    "nowhere": ({"lan_address": ""}, "nowhere has no lan_address"),
    "first": ({"first_address": "198.18.50.160"}, "first_address of first is 198.18.50.160, which check0 and same"),
    "user": ({"ansible_user": "ubuntu"}, "The ansible_user of user is 'ubuntu', but the controller"),
    "name": ({"first_user": "Ada B"}, "The first_user of name is 'Ada B', which is no user's name"),
    "address": ({"public_address": "root@203.0.113.7"}, "of address is 'root@203.0.113.7', which is neither an"),
    "link": ({"public_address": "https://gpu.org"}, "of link is 'https://gpu.org', which is neither an address nor"),
    "port": ({"public_ssh_port": 20456}, "port has a public_ssh_port, but no public_address: name both"),
}  # fmt: skip


def test_all_that_cannot_be_is_said_of_every_node(tmp_path: Path) -> None:
    nodes = TWO | {
        name: {"lan_address": f"198.18.50.{170 + number}", "first_user": "ada"} | said
        for number, (name, (said, _)) in enumerate(WRONG.items())
    }
    code, said = checked(tmp_path, nodes | {"none": {"first_user": "ada"}}, wsl=("check1", "check7"))
    assert code != 0
    sentences = [
        *(sentence for _, sentence in WRONG.values()),
        "none has no lan_address",
        "check7 is in the group `wsl`, but no node of",
    ]
    assert [sentence for sentence in sentences if sentence not in said] == [], said


@pytest.mark.parametrize(
    ("nodes", "settings", "sentences"),
    [
        pytest.param({}, {}, ["has no nodes"], id="no nodes"),
        pytest.param(TWO, {"inventory_check_interface": "absent0"}, ["The lab is not up"], id="no lab"),
        pytest.param(TWO, {"lan_prefix": "/24"}, ["lan_prefix is /24"], id="no number"),
        pytest.param(
            TWO,
            {"lan_gateway": "198.18.51.1", "ssh_port": 70000, "tensorboard_port": 12355, "first_user": "",
             "admin_networks": ["192.168.50.0/240"], "ssh_second_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5",
             "shared_directory": "/home/ubuntu/simpletuner/output"},
            ["lan_gateway '198.18.51.1' is not in the nodes' network", "ssh_port is 70000, which is no port",
             "ssh_port, rendezvous_port and tensorboard_port are 70000, 12355, 12355: give each a port of its own",
             "Nobody has said as whom bootstrap shall log in on check0 and check1: first_user",
             "admin_networks names 192.168.50.0/240",
             "ssh_second_key is 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5', which is neither",
             "shared_directory is /home/ubuntu/simpletuner/output, which lies in somebody's home"],
            id="settings",
        ),
        pytest.param(
            TWO,
            {"lan_prefix": 33, "ssh_second_key": "/nobody.pub", "inventory_check_bootstrapped": True,
             "admin_networks": TABLE, "lan_services": "udp/5353", "lan_nameservers": None},
            ["lan_prefix is 33", "nor a file with one on this machine",
             "check0, check1 have not been through bootstrap: ansible-playbook -i",
             # A text where a list belongs is one sentence and not one a letter.
             f"admin_networks is {TABLE}, which is no list: write [{TABLE}], in brackets.",
             "lan_services is udp/5353, which is no list: write [udp/5353], in brackets.",
             "lan_nameservers is empty, which is no list: write [], in brackets."],
            id="other settings",
        ),
        pytest.param(
            {**TWO, "check2": {"lan_address": "198.18.50.162", "public_address": "203.0.113.7"}},
            {"overlay": True, "overlay_network": "10.201.0.0/28"},
            ["overlay_network is 10.201.0.0/28, which is no network with room for a LAN of /24",
             "An overlay joins PCs of one LAN, with a Linux of their own; check2 is none"],
            id="overlay",
        ),
        pytest.param(
            TWO, {"overlay": True, "overlay_network": "overlay"}, ["overlay_network is overlay, which"], id="no network"
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(
    tmp_path: Path, nodes: dict[str, Any], settings: dict[str, Any], sentences: list[str]
) -> None:
    code, said = checked(tmp_path, nodes, **settings)
    assert code != 0
    assert [sentence for sentence in sentences if sentence not in said] == [], said
    assert settings.get("admin_networks") != TABLE or "admin_networks names" not in said


def test_a_setting_that_is_needed_and_not_there_is_named(tmp_path: Path) -> None:
    settings = (tree.ROOT / "inventory/lan/group_vars/all/settings.yml").read_text()
    (tmp_path / "group_vars").mkdir()
    kept = [line for line in settings.splitlines() if not line.startswith(("lan_prefix", "admin_networks"))]
    (tmp_path / "group_vars/all.yml").write_text("\n".join(kept))
    (tmp_path / "hosts.yml").write_text(json.dumps({"cluster": {"hosts": TWO}}))
    done = playbook("-i", tmp_path / "hosts.yml", "playbooks/inventory_check.yml")
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "settings.yml has no lan_prefix, admin_networks: inventory/lan has an example." in said, said


def test_a_passphrase_that_no_agent_knows_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ansible asks nobody for it. The answer comes by a program in the place of a person at a terminal."""
    state = tmp_path / "state"
    state.mkdir()
    key = state / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "a secret", "-f", key], check=True)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    code, said = checked(tmp_path, TWO)
    assert code != 0 and "has a passphrase, and no ssh-agent here knows it. Type: ssh-add" in said, said
    (tmp_path / "group_vars").unlink()
    answer = tmp_path / "answer"
    answer.write_text("#!/bin/sh\necho a secret\n")
    answer.chmod(0o755)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.PIPE)
    try:
        assert agent.stdout and agent.stdout.readline()
        words = ["env", "SSH_ASKPASS_REQUIRE=force", f"SSH_ASKPASS={answer}", "ssh-add", "-q", str(key)]
        subprocess.run(words, check=True, timeout=20)
        code, said = checked(tmp_path, TWO)
    finally:
        agent.terminate()
        agent.wait(10)
    assert code == 0, said
