"""ansible.posix.synchronize has habits of its own about SSH, which every task has to be told to leave."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import says

FILES = [
    path
    for path in sorted(tree.ROOT.glob("roles/*/tasks/*.yml"))
    if "synchronize:" in path.read_text("utf-8")
]


def tasks(node: Any) -> Iterator[dict[str, Any]]:
    """Every task with synchronize in a file of tasks."""
    if isinstance(node, dict):
        if "ansible.posix.synchronize" in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for entry in node:
            yield from tasks(entry)


@pytest.mark.parametrize("path", FILES, ids=tree.relative)
def test_rsync_connects_as_ansible_does(path: Path) -> None:
    for task in tasks(yaml.safe_load(path.read_text("utf-8"))):
        settings = task["ansible.posix.synchronize"]
        where = f"{tree.relative(path)}, copy to {settings['dest']}"
        assert settings.get("use_ssh_args"), f"{where}: use_ssh_args is missing (the project's known_hosts)"
        assert settings.get("verify_host"), f"{where}: without verify_host any machine is taken for the node"
        assert "dest_port" in settings, (
            f"{where}: dest_port is missing; ansible_port is not seen when it is a template"
        )


@pytest.mark.parametrize("path", FILES, ids=tree.relative)
def test_rsync_is_never_root_where_sudo_asks_for_a_password(path: Path) -> None:
    """It is `sudo -u root rsync` on the far side then, where nobody can answer. As aura it may (bootstrap)."""
    for task in tasks(yaml.safe_load(path.read_text("utf-8"))):
        as_aura = task["ansible.posix.synchronize"].get("rsync_path") == "sudo -u aura rsync"
        become = task.get("become", False)
        assert (as_aura and not become) or "asked" in str(become), f"{tree.relative(path)}: {task['name']}"
    sudoers = (tree.ROOT / "roles/bootstrap/tasks/root.yml").read_text("utf-8")
    assert "ALL=(aura) NOPASSWD: /usr/bin/rsync" in sudoers


@pytest.mark.parametrize(("settings", "asked"), [({}, False), ({"ansible_become_password": "secret"}, True)])
def test_who_has_a_password_receives_as_himself(settings: dict[str, str], asked: bool) -> None:
    assert says("python_env", "__python_env_asked", **settings) is asked
