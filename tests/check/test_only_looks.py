"""Who only looks (--check, or a playbook that says what it would do) changes nothing, and is told what is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tree
from plays import played, plays_of

MARK: dict[str, Any] = {"ansible.builtin.command": "/usr/bin/touch {{ playbook_dir }}/changed"}
HERE = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
TWO = {"cluster": {"hosts": {"node0": HERE, "node1": HERE}}}


def prepared(place: Path, *words: str) -> str:
    """What prepare.yml says of who builds the corpus and who has it, without a request and without its role."""
    play = plays_of("prepare")[-1]
    play.pop("vars_files")
    build, _, say = play["tasks"]
    builds = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} builds it."}, "when": build["when"]}
    plays = [play | {"tasks": [builds, say]}]
    groups = TWO | {"active_nodes": TWO["cluster"]}  # all answer
    done = played(place, plays, groups, *words, "-e", "corpus=es", "-e", "preset=gpt2-nano")
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_first_node_that_takes_part_builds_the_corpus(tmp_path: Path) -> None:
    """Without node0, what an earlier time has left would go to all as the new one."""
    all_of_them, without = prepared(tmp_path), prepared(tmp_path, "--limit", "cluster:!node0")
    assert "node0 builds it." in all_of_them and "node1 builds it." not in all_of_them
    assert "The corpus es is on node0, node1." in all_of_them
    assert "node1 builds it." in without and "The corpus es is on node1." in without


@pytest.mark.parametrize("playbook", ["launch", "launch_script"])
def test_a_launch_has_no_check(tmp_path: Path, playbook: str) -> None:
    """It showed the ranks of an earlier run, or failed because none said anything."""
    first = plays_of(playbook)[0]
    first.pop("vars_files", None)
    (tmp_path / "tasks").symlink_to(tree.ROOT / "playbooks/tasks")
    done = played(tmp_path, [first | {"tasks": [first["tasks"][0], MARK]}], TWO, "--check")
    assert done.returncode != 0 and "A launch has no --check" in done.stdout, done.stdout
    assert "No node has been touched." in done.stdout
    assert played(tmp_path, [first | {"tasks": first["tasks"][:1]}], TWO).returncode == 0
