"""ansible.posix.synchronize has habits of its own about SSH, which every task has to be told to leave."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml

FILES = [
    path
    for path in sorted(tree.ROOT.glob("roles/*/tasks/*.yml"))
    if "synchronize:" in path.read_text("utf-8")
]


def copies(node: Any) -> Iterator[dict[str, Any]]:
    """The settings of every synchronize in a file of tasks."""
    if isinstance(node, dict):
        if "ansible.posix.synchronize" in node:
            yield node["ansible.posix.synchronize"]
        node = list(node.values())
    if isinstance(node, list):
        for entry in node:
            yield from copies(entry)


@pytest.mark.parametrize("path", FILES, ids=tree.relative)
def test_rsync_connects_as_ansible_does(path: Path) -> None:
    for settings in copies(yaml.safe_load(path.read_text("utf-8"))):
        where = f"{tree.relative(path)}, copy to {settings['dest']}"
        assert settings.get("use_ssh_args"), f"{where}: use_ssh_args is missing (the project's known_hosts)"
        assert settings.get("verify_host"), f"{where}: without verify_host any machine is taken for the node"
        assert "dest_port" in settings, (
            f"{where}: dest_port is missing; ansible_port is not seen when it is a template"
        )
