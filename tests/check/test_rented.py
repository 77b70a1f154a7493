"""The inventory of a rented machine: accepted as it is, left at its address, and looked for where it can be reached."""

import json
import shutil
from pathlib import Path

import pytest
import tree
from plays import playbook, told

RENTED = tree.ROOT / "inventory/rented"


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    shutil.copytree(RENTED, tmp_path / "rented", ignore=shutil.ignore_patterns("state"))
    return tmp_path / "rented"


def test_the_example_is_accepted_and_touches_no_address(inventory: Path) -> None:
    options = json.dumps({"inventory_check_bootstrapped": False})
    done = playbook("-i", inventory, "playbooks/inventory_check.yml", "-e", options)
    assert done.returncode == 0, done.stdout
    switches = ("network_enabled", "nfs_server_enabled", "nfs_client_enabled", "run_copies_enabled")
    wanted = dict.fromkeys(switches, False) | {
        "firewall_peers": ["203.0.113.7"], "firewall_admin_networks": ["198.51.100.23"], "firewall_admin_ports": [],
        "tensorboard_address": "127.0.0.1",
    }  # fmt: skip
    assert told(inventory, "gpu0", *wanted) == wanted


def test_it_is_looked_for_where_it_is_reached_and_nowhere_else(inventory: Path) -> None:
    """Its own address may be that of another machine in the network of whoever asks."""
    names = ("ansible_host", "ansible_port", "cluster_places", "firewall_admin_ports")
    nat = {"lan_address": "10.0.0.5", "public_address": "gpu.example.org", "public_ssh_port": 20456}
    there = {"addresses": ["gpu.example.org"], "ports": [20456]}
    hosts = inventory / "hosts.yml"
    hosts.write_text(json.dumps({"cluster": {"hosts": {"gpu0": nat}}}))
    wanted = ["gpu.example.org", 20456, there, []]
    assert list(told(inventory, "gpu0", *names).values()) == wanted
    # One whose SSH is not translated may get another port for it, as others do.
    del nat["public_ssh_port"]
    hosts.write_text(json.dumps({"cluster": {"hosts": {"gpu0": nat | {"ssh_port": 2222}}}}))
    assert told(inventory, "gpu0", "cluster_places")["cluster_places"]["ports"] == [2222, 22]
