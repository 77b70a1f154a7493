"""What is said of an inventory that cannot be right, before the first packet."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree

ADA = {"first_user": "ada"}
TWO = {"check0": ADA | {"lan_address": "198.18.50.161"}, "check1": ADA | {"lan_address": "198.18.50.162"}}


def checked(
    place: Path, nodes: dict[str, Any], wsl: tuple[str, ...] = (), more: dict[str, Any] | None = None
) -> tuple[int, str]:
    """What playbooks/inventory_check.yml says of this hosts.yml; nobody has seen its nodes yet."""
    groups = {"cluster": {"hosts": nodes}} | ({"wsl": {"hosts": dict.fromkeys(wsl)}} if wsl else {})
    (place / "hosts.yml").write_text(json.dumps(groups))
    (place / "group_vars").symlink_to(tree.ROOT / "inventory/lan/group_vars")
    settings = json.dumps({"inventory_check_bootstrapped": False, "lan_gateway": ""} | (more or {}))
    done = subprocess.run(
        ["ansible-playbook", "-i", place / "hosts.yml", "playbooks/inventory_check.yml", "-e", settings],
        cwd=tree.ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=120, check=False, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    return done.returncode, " ".join(done.stdout.split())


def test_an_inventory_that_is_right_is_accepted(tmp_path: Path) -> None:
    code, said = checked(tmp_path, TWO, wsl=("check1",))
    assert code == 0 and "2 nodes" in said, said


@pytest.mark.parametrize(
    ("nodes", "wsl", "sentence"),
    [
        ({}, (), "has no nodes"),
        (TWO | {"CHECK0": {"lan_address": "198.18.50.163"}}, (), "check0 and CHECK0 are the same hostname"),
        (TWO | {"check1": {"lan_address": "198.18.50.161"}}, (), "have the same lan_address 198.18.50.161"),
        (TWO | {"check1": {"lan_address": "198.18.51.162"}}, (), "The nodes are not in one network"),
        (TWO | {"check1": {"lan_address": "127.0.0.1"}}, (), "of check1 is 127.0.0.1, which no machine in a LAN"),
        (TWO | {"check1": {}}, (), "check1 has no lan_address"),
        (
            TWO | {"check1": TWO["check1"] | {"first_address": "198.18.50.161"}}, (),
            "The first_address of check1 is 198.18.50.161, which check0 shall have",
        ),
        (TWO | {"check1": TWO["check1"] | {"lan_interface": "the left one"}}, (), "The lan_interface of check1"),
        (TWO | {"check1": TWO["check1"] | {"ansible_user": "ubuntu"}}, (), "The ansible_user of check1 is 'ubuntu'"),
        (TWO | {"check1": TWO["check1"] | {"first_user": "Ada B"}}, (), "The first_user of check1 is 'Ada B'"),
        (TWO | {"check1": TWO["check1"] | {"public_ssh_port": 1}}, (), "check1 has a public_ssh_port, but no public"),
        (TWO | {"check1": TWO["check1"] | {"public_address": "a b"}}, (), "The public_address of check1 is 'a b'"),
        (TWO, ("check1", "check7"), "check7 is in the group `wsl`, but no node of `cluster`"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(
    tmp_path: Path, nodes: dict[str, Any], wsl: tuple[str, ...], sentence: str
) -> None:
    code, said = checked(tmp_path, nodes, wsl)
    assert code != 0 and sentence in said, said


def test_a_text_where_a_list_belongs_is_one_sentence_and_not_one_a_letter(tmp_path: Path) -> None:
    texts = {"admin_networks": "192.168.50.0/24", "lan_services": "udp/5353", "lan_nameservers": None}
    code, said = checked(tmp_path, TWO, more=texts)
    assert code != 0
    assert (
        "admin_networks is '192.168.50.0/24', which is no list: write [192.168.50.0/24], in brackets." in said
    )
    assert "lan_services is 'udp/5353', which is no list: write [udp/5353], in brackets." in said
    assert "lan_nameservers is empty, which is no list: write [], in brackets." in said
    assert "admin_networks names" not in said
