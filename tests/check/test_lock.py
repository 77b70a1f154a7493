"""One command at a time on an inventory: a second one is refused, and a killed one leaves nothing behind."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree
from plays import playbook, plays_of

# These change neither a node nor what the controller knows of it.
ONLY_LOOK = {"connectivity", "inventory_check", "logs", "status"}
ONLY_HERE = {"windows"}  # without a node
IMPORTED = {"restarts"}  # by site.yml, which has the lock
TASKS = tree.ROOT / "playbooks/tasks"
WORK = f"""
- hosts: cluster
  gather_facts: false
  tasks:
    - {{ansible.builtin.import_tasks: {TASKS}/lock.yml}}
    - {{ansible.builtin.import_tasks: {TASKS}/lock.yml, when: twice | default(false) | bool}}
    - {{ansible.builtin.import_tasks: {TASKS}/unlock.yml, when: follow | default(false) | bool}}
    - {{ansible.builtin.file: {{path: "{{{{ playbook_dir }}}}/working", state: touch}}, run_once: true}}
    - {{ansible.builtin.pause: {{seconds: 240}}}}
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """Two nodes that are this machine and have been through bootstrap."""
    place = tmp_path / "inventory"
    (place / "state").mkdir(parents=True, mode=0o700)
    (place / "state/known_hosts").write_text("node0 ssh-ed25519 AAAA\nnode1 ssh-ed25519 AAAB\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "state/id_ed25519"], check=True
    )
    (place / "group_vars").symlink_to(tree.ROOT / "inventory/lan/group_vars")
    here = {
        "ansible_connection": "local", "ansible_become": False, "ansible_host": "127.0.0.1",
        "cluster_places": {"addresses": ["127.0.0.1"], "ports": [9]},
    }  # fmt: skip
    nodes = {f"node{number}": {"lan_address": f"192.168.50.2{number}"} for number in range(2)}
    (place / "hosts.yml").write_text(json.dumps({"cluster": {"hosts": nodes, "vars": here}}))
    return place


@pytest.fixture
def work(inventory: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is at work on these nodes. Its parameter: the options that it is started with."""
    path = inventory.parent / "work.yml"
    path.write_text(WORK)
    (path.parent / "group_vars").symlink_to(tree.ROOT / "playbooks/group_vars")
    command = subprocess.Popen(
        ["ansible-playbook", "-i", inventory, path, *getattr(request, "param", [])],
        cwd=tree.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        give_up = time.monotonic() + 60
        while not (path.parent / "working").exists():
            assert command.poll() is None and time.monotonic() < give_up, "it does not begin"
            time.sleep(0.1)
        yield command
    finally:
        command.kill()
        command.wait()


SECRETS = ["-e", "secret=hush", "-e", '{"key": "hush"}', "--extra-vars=word=hush", "-vehush=hush"]


@pytest.mark.parametrize("work", [SECRETS], indirect=True)
def test_a_second_command_is_refused_until_the_first_has_been_killed(
    inventory: Path, work: subprocess.Popen[bytes]
) -> None:
    for name, *words in (["stop"], ["reset", "-e", "yes=true"], ["launch", "-e", "preset=gpt2-nano"]):
        done = playbook("-i", inventory, f"playbooks/{name}.yml", *words)
        said = " ".join(done.stdout.split())
        assert done.returncode != 0 and "has been at work on these nodes since" in said, said
        assert f"(process {work.pid}) with: ansible-playbook -i {inventory}" in said
        assert "Nothing has been changed on any node." in said
        assert "=hush" not in said and 'hush"' not in said, "what -e says is nobody else's business"
    assert playbook("-i", inventory, "playbooks/status.yml").returncode == 0

    work.kill()
    work.wait()
    done = playbook("-i", inventory, "playbooks/stop.yml")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("work", [["-e", "twice=true", "-e", "follow=true"]], indirect=True)
def test_a_command_takes_the_lock_twice_and_others_go_on_once_it_only_follows(
    inventory: Path, work: subprocess.Popen[bytes]
) -> None:
    assert playbook("-i", inventory, "playbooks/stop.yml").returncode == 0
    assert work.poll() is None


def test_every_playbook_that_changes_something_takes_the_lock_before_it_reaches_a_node() -> None:
    names = {path.stem for path in (tree.ROOT / "playbooks").glob("*.yml")}
    assert names > ONLY_LOOK | ONLY_HERE | IMPORTED
    for name in names - ONLY_LOOK - ONLY_HERE - IMPORTED:
        text = (tree.ROOT / f"playbooks/{name}.yml").read_text()
        text = re.sub(
            r"_role:\s+name: script\s+tasks_from: request\n", "", text
        )  # that stays on the controller
        lock = text.find("tasks/lock.yml")
        reaches = [text.find(f"tasks/{file}.yml") for file in ("find_nodes", "see_who_takes_part")]
        reaches += [text.find(role) for role in ("_role:", "roles:")]
        assert 0 < lock < min(place for place in reaches if place > 0), name


@pytest.mark.parametrize("name", ["launch", "launch_script"])
def test_a_launch_that_follows_its_run_gives_the_lock_back_first(name: str) -> None:
    tasks = plays_of(name)[-1]["tasks"]
    unlock, follow = (
        next(number for number, task in enumerate(tasks) if f"tasks/{file}.yml" in str(task))
        for file in ("unlock", "follow")
    )
    assert unlock < follow and tasks[unlock]["when"] == tasks[follow]["when"]
