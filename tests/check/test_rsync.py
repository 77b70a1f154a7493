"""Directories come to the nodes by rsync in one way only, which is told to leave habits of its own about SSH."""

from types import SimpleNamespace
from typing import Any

import pytest
import tree

give = tree.plugin("action/give_directory")
GB = 1 << 30


def test_rsync_connects_as_ansible_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def synchronize(name: str, task: SimpleNamespace, **_: object) -> SimpleNamespace:
        asked.update(task.args)
        return SimpleNamespace(run=lambda task_vars: {"changed": True})

    monkeypatch.setattr(give.action_loader, "get", synchronize)
    monkeypatch.setattr(give.ActionBase, "run", lambda *_: {})
    task = SimpleNamespace(args={"from": "/a/", "to": "/b/", "user": "aura", "options": ["--links"]})
    task.copy = lambda: task
    templar = SimpleNamespace(template=lambda text: text.replace("{{ ssh_port }}", "2222"))
    action = give.ActionModule(task, None, None, None, templar, None)
    assert action.run(task_vars={"ansible_port": "{{ ssh_port }}"}) == {"changed": True}
    assert asked["use_ssh_args"], "the project's known_hosts"
    assert asked["verify_host"], "without it any machine is taken for the node"
    assert asked["dest_port"] == 2222, "synchronize does not see an ansible_port that is a template"
    assert asked["rsync_opts"] == ["--mkpath", "--links"]
    # Never as root: a link that lies below another user's directory would lead it anywhere.
    assert asked["rsync_path"] == "sudo -u aura rsync"


@pytest.mark.parametrize(
    ("there", "free", "fits"), [(0, 90 * GB, False), (0, 102 * GB, True), (20 * GB, 82 * GB, True)]
)
def test_what_an_earlier_copy_has_brought_needs_no_room(there: int, free: int, fits: bool) -> None:
    problem = give.no_room(100 * GB, there, free, "/var/lib/aura/texts of node1")
    assert fits == (problem == "")
    assert fits or "texts of node1: it is 107.4 GB, and 96.6 GB are free" in problem


def test_nobody_calls_rsync_in_another_way() -> None:
    tasks = [*tree.ROOT.glob("roles/*/tasks/*.yml"), *tree.ROOT.glob("playbooks/**/*.yml")]
    others = [tree.relative(path) for path in tasks if "synchronize:" in path.read_text("utf-8")]
    assert not others, f"{others}: take give_directory"
