"""Every inventory has our variables, wherever it lies, and what it says itself wins."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from plays import playbook

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
    hosts = HOSTS | {"other": {"hosts": {"c": {}}}}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    wanted = ours("all/derived.yml") | ours("cluster/connection.yml")
    for source in (inventory, inventory / "hosts.yml"):
        found = variables(source)
        assert {name: found.get(name) for name in wanted} == wanted
    outside = variables(inventory, "c")
    assert "cluster_rank0" in outside and "ansible_host" not in outside


def test_what_the_inventory_says_wins(inventory: Path) -> None:
    """In its group_vars, in hosts.yml and in host_vars; a group of ours says otherwise than all."""
    mine = {"cluster_state": "mine", "ansible_port": "mine"}  # one of ours for all hosts, one for the cluster
    for where in ("all", "cluster"):
        say(inventory, dict(mine), f"{where}/settings.yml")
        assert mine.items() <= variables(inventory).items(), where
        shutil.rmtree(inventory / "group_vars")
        hosts = HOSTS | {where: HOSTS.get(where, {}) | {"vars": mine}}
        (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
        assert mine.items() <= variables(inventory).items(), where
    name = "nfs_client_enabled"
    groups = HOSTS | {"wsl": {"hosts": {"b": {}}}}
    for said in (False, True):
        more: dict[str, Any] = {"all": {"vars": {name: "mine"}}} if said else {}
        (inventory / "hosts.yml").write_text(yaml.safe_dump(groups | more))
        assert variables(inventory, "b")[name] == ("mine" if said else ours("wsl/switches.yml")[name])
    (inventory / "host_vars").mkdir()
    (inventory / "host_vars/a.yml").write_text(yaml.safe_dump({"ansible_port": 2200}))
    assert variables(inventory)["ansible_port"] == 2200
    assert variables(inventory, "b")["ansible_port"] == ours("cluster/connection.yml")["ansible_port"]


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
