"""Every inventory has our variables, wherever it lies, and what it says itself wins."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from plays import playbook, told

NODES = {"a": {"lan_address": "192.0.2.1"}, "b": {"lan_address": "192.0.2.2"}}
HOSTS: dict[str, Any] = {"cluster": {"hosts": NODES}}


def variables(inventory: Path, host: str = "a") -> dict[str, Any]:
    # From the repository, as the documentation says: so its ansible.cfg is found.
    command = ["ansible-inventory", "-i", str(inventory), "--host", host]
    return json.loads(subprocess.check_output(command, cwd=tree.ROOT))


def say(inventory: Path, settings: dict[str, object], where: str = "all.yml") -> None:
    """In group_vars of the inventory."""
    file = inventory / "group_vars" / where
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(settings))


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """An inventory elsewhere, with nothing but two hosts."""
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(HOSTS))
    return tmp_path


def ours(path: str) -> dict[str, Any]:
    return yaml.safe_load((tree.ROOT / "playbooks/group_vars" / path).read_text())


def test_an_inventory_elsewhere_has_them(inventory: Path) -> None:
    wanted = ours("all/derived.yml") | ours("cluster/connection.yml")
    for source in (inventory, inventory / "hosts.yml"):
        found = variables(source)
        assert {name: found.get(name) for name in wanted} == wanted


def test_a_host_outside_the_cluster_has_only_those_of_all(inventory: Path) -> None:
    (inventory / "hosts.yml").write_text(yaml.safe_dump(HOSTS | {"other": {"hosts": {"c": {}}}}))
    found = variables(inventory, "c")
    assert "cluster_rank0" in found
    assert "ansible_host" not in found


# One of ours for all hosts, one for the cluster.
MINE = {"cluster_state": "mine", "ansible_port": "mine"}


@pytest.mark.parametrize("where", ["all", "cluster"])
def test_the_inventorys_group_vars_win(inventory: Path, where: str) -> None:
    say(inventory, {**MINE}, f"{where}/settings.yml")
    assert MINE.items() <= variables(inventory).items()


@pytest.mark.parametrize("where", ["all", "cluster"])
def test_the_variables_in_hosts_yml_win(inventory: Path, where: str) -> None:
    hosts = HOSTS | {where: HOSTS.get(where, {}) | {"vars": MINE}}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    assert MINE.items() <= variables(inventory).items()


def test_a_group_of_ours_says_otherwise_than_all_and_the_inventory_wins_over_both(inventory: Path) -> None:
    name, hosts = "nfs_client_enabled", HOSTS | {"wsl": {"hosts": {"b": {}}}}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    assert variables(inventory, "a")[name] == ours("all/derived.yml")[name]
    assert variables(inventory, "b")[name] == ours("wsl/switches.yml")[name]
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts | {"all": {"vars": {name: "mine"}}}))
    assert variables(inventory, "b")[name] == "mine"


def test_host_vars_win(inventory: Path) -> None:
    (inventory / "host_vars").mkdir()
    (inventory / "host_vars/a.yml").write_text(yaml.safe_dump({"ansible_port": 2200}))
    assert variables(inventory)["ansible_port"] == 2200
    assert variables(inventory, "b")["ansible_port"] == ours("cluster/connection.yml")["ansible_port"]


def test_a_play_sees_what_ansible_inventory_says(inventory: Path) -> None:
    """Also when it asks for one host only, and localhost, which is in no inventory."""
    say(inventory, {"ssh_port": 2222})
    wanted = {"ansible_host": "192.0.2.2", "ansible_port": 2222, "cluster_rank0": "a"}
    assert told(inventory, "b", *wanted) == wanted
    assert told(inventory, "localhost", "cluster_root") == {"cluster_root": str(tree.ROOT)}


def test_the_firewall_guards_the_port_that_tensorboard_has(inventory: Path) -> None:
    """It has no password: peers must not reach it because somebody has moved it."""
    say(inventory, {"tensorboard_port": 6007})
    names = ("tensorboard_port", "firewall_tensorboard_port", "inventory_check_ports.tensorboard_port")
    assert told(inventory, "a", *names) == dict.fromkeys(names, 6007)


@pytest.mark.parametrize("none", [None, False, ""])
def test_what_is_set_to_nothing_is_off(inventory: Path, none: object) -> None:
    say(inventory, dict.fromkeys(("shared_directory", "shared_source", "heartbeat_url", "webhooks"), none))
    switches = ("nfs_server_enabled", "nfs_client_enabled", "run_copies_enabled", "notify_enabled")
    wanted = dict.fromkeys(switches, False) | {"script_shared_directory": ""} | {"nfs_server_node": "a"}
    for host in ("a", "b"):
        assert told(inventory, host, *wanted) == wanted


@pytest.mark.parametrize(
    ("address", "way"),
    [
        (
            "",
            r"ssh -N -L 6006:127\.0\.0\.1:6006 -p 22 -l aura-admin -i \S+id_ed25519 .* 192\.0\.2\.1 \(then http://127\.0\.0\.1:6006\)",
        ),
        ("{{ lan_address }}", r"http://192\.0\.2\.1:6006"),
    ],
)
def test_tensorboard_is_seen_through_ssh_unless_somebody_opens_it(
    inventory: Path, address: str, way: str
) -> None:
    say(inventory, {"tensorboard_address": address} if address else {})
    said = " ".join(told(inventory, "a", "tensorboard_way")["tensorboard_way"].split())
    assert re.search(way, said), said


def test_a_task_that_is_delegated_asks_for_the_key_of_the_host_it_goes_to(
    inventory: Path, tmp_path: Path
) -> None:
    """inventory_hostname is the other one there, and its key would be "changed"."""
    task = {"ansible.builtin.command": "true", "delegate_to": "b"}
    # Nobody listens there; the words for ssh are what is looked at.
    closed = {"ansible_host": "127.0.0.1", "ansible_port": 1}
    path = tmp_path / "delegated.yml"
    path.write_text(yaml.safe_dump([{"hosts": "a", "tasks": [task], "vars": closed}]))
    said = playbook("-vvvv", "-i", "playbooks/no_hosts", "-i", inventory / "hosts.yml", path).stdout
    assert "HostKeyAlias=b" in said, said[-2000:]
    assert "HostKeyAlias=a" not in said
