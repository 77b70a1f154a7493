"""Every inventory has our variables, wherever it lies, and what it says itself wins."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml

HOSTS: dict[str, Any] = {
    "cluster": {"hosts": {"a": {"lan_address": "192.0.2.1"}, "b": {"lan_address": "192.0.2.2"}}}
}


def ansible(*words: str | Path) -> str:
    # From the repository, as the documentation says: so its ansible.cfg is found.
    return subprocess.run(words, cwd=tree.ROOT, capture_output=True, text=True, check=True).stdout


def variables(inventory: Path, host: str = "a") -> dict[str, Any]:
    return json.loads(ansible("ansible-inventory", "-i", inventory, "--host", host))


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


@pytest.mark.parametrize("where", ["all", "cluster"])
@pytest.mark.parametrize("name", ["cluster_state", "ansible_port"])
def test_the_inventorys_group_vars_win(inventory: Path, where: str, name: str) -> None:
    (inventory / f"group_vars/{where}").mkdir(parents=True)
    (inventory / f"group_vars/{where}/settings.yml").write_text(yaml.safe_dump({name: "mine"}))
    assert variables(inventory)[name] == "mine"


@pytest.mark.parametrize("where", ["all", "cluster"])
@pytest.mark.parametrize("name", ["cluster_state", "ansible_port"])
def test_the_variables_in_hosts_yml_win(inventory: Path, where: str, name: str) -> None:
    hosts = HOSTS | {where: HOSTS.get(where, {}) | {"vars": {name: "mine"}}}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    assert variables(inventory)[name] == "mine"


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
    (inventory / "group_vars").mkdir()
    (inventory / "group_vars/all.yml").write_text(yaml.safe_dump({"ssh_port": 2222}))
    for host, expression, wanted in [
        ("b", "{{ ansible_host }}:{{ ansible_port }} {{ cluster_rank0 }}", "192.0.2.2:2222 a"),
        ("localhost", "{{ cluster_root }}", str(tree.ROOT)),
    ]:
        said = ansible(
            "ansible", "-i", inventory, host, "-m", "ansible.builtin.debug", "-a", f"msg='{expression}'"
        )
        assert wanted in " ".join(said.split())


def test_the_firewall_guards_the_port_that_tensorboard_has(inventory: Path) -> None:
    """It has no password: peers must not reach it because somebody has moved it."""
    (inventory / "group_vars").mkdir()
    (inventory / "group_vars/all.yml").write_text(yaml.safe_dump({"tensorboard_port": 6007}))
    names = ("tensorboard_port", "firewall_tensorboard_port", "inventory_check_ports.tensorboard_port")
    asked = " ".join(f"{{{{ {name} }}}}" for name in names)
    said = ansible("ansible", "-i", inventory, "a", "-m", "ansible.builtin.debug", "-a", f"msg='{asked}'")
    assert "6007 6007 6007" in said


@pytest.mark.parametrize("none", [None, False, ""])
def test_what_is_set_to_nothing_is_off(inventory: Path, none: object) -> None:
    (inventory / "group_vars").mkdir()
    names = ("shared_directory", "shared_source", "heartbeat_url", "webhooks")
    settings = dict.fromkeys(names, none)
    (inventory / "group_vars/all.yml").write_text(yaml.safe_dump(settings))
    asked = [
        *("nfs_server_enabled", "nfs_client_enabled", "run_copies_enabled", "notify_enabled"),
        *("inventory_check_shared_directory", "script_shared_directory", "nfs_server_node"),
    ]
    said = ansible(
        "ansible", "-i", inventory, "cluster", "-m", "ansible.builtin.debug",
        "-a", f"msg={{{{ [{', '.join(asked)}] | to_json }}}}",
    )  # fmt: skip
    assert said.count(json.dumps([False] * 4 + ["", "", "a"])) == 2, said


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
    (inventory / "group_vars").mkdir()
    own = {"tensorboard_address": address} if address else {}
    (inventory / "group_vars/all.yml").write_text(yaml.safe_dump(own))
    said = ansible(
        "ansible", "-i", inventory, "a", "-m", "ansible.builtin.debug", "-a", "var=tensorboard_way"
    )
    assert re.search(way, " ".join(said.split())), said


def test_a_task_that_is_delegated_asks_for_the_key_of_the_host_it_goes_to(
    inventory: Path, tmp_path: Path
) -> None:
    """inventory_hostname is the other one there, and its key would be "changed"."""
    task = {"ansible.builtin.command": "true", "delegate_to": "b"}
    # Nobody listens there; the words for ssh are what is looked at.
    closed = {"ansible_host": "127.0.0.1", "ansible_port": 1}
    playbook = tmp_path / "delegated.yml"
    playbook.write_text(yaml.safe_dump([{"hosts": "a", "tasks": [task], "vars": closed}]))
    said = subprocess.run(
        ["ansible-playbook", "-vvvv", "-i", "playbooks/no_hosts", "-i", inventory / "hosts.yml", playbook],
        cwd=tree.ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert "HostKeyAlias=b" in said, said[-2000:]
    assert "HostKeyAlias=a" not in said
