"""Every role of site.yml can be run alone, left out on a host, and step by step."""

from __future__ import annotations

from typing import Any

import pytest
import tree
import yaml

STEPS = {"preflight", "install", "configure", "run"}


def roles_of_site() -> list[dict[str, Any]]:
    plays = yaml.safe_load((tree.ROOT / "playbooks/site.yml").read_text())
    return [
        entry if isinstance(entry, dict) else {"role": entry}
        for play in plays
        for entry in play.get("roles", [])
    ]


@pytest.fixture(params=roles_of_site(), ids=lambda entry: entry["role"])
def entry(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_it_has_its_name_as_a_tag(entry: dict[str, Any]) -> None:
    assert entry.get("tags") == entry["role"], (
        f"playbooks/site.yml: {entry['role']} needs tags: {entry['role']}"
    )


def test_it_has_a_switch(entry: dict[str, Any]) -> None:
    role = entry["role"]
    if role == "safe_change":
        return  # the others' way to change something: without it they could not
    specs = yaml.safe_load((tree.ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())
    assert f"{role}_enabled" in specs["argument_specs"]["main"]["options"]
    tasks = (tree.ROOT / f"roles/{role}/tasks/main.yml").read_text()
    assert f"when: {role}_enabled" in tasks, f"roles/{role}/tasks/main.yml does not heed {role}_enabled"


def tags_of(task: dict[str, Any]) -> set[str]:
    tags = task.get("tags", [])
    return {tags} if isinstance(tags, str) else set(tags)


def included(
    role: str, name: str = "main.yml", applied: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """The tasks of this file and of those that it includes, each with the tags by which it is really chosen."""
    found = []
    waiting = [
        (task, applied) for task in yaml.safe_load((tree.ROOT / f"roles/{role}/tasks/{name}").read_text())
    ]
    while waiting:
        task, inherited = waiting.pop(0)
        tags = inherited | tags_of(task)
        waiting += [(inner, tags) for inner in task.get("block", [])]
        include = task.get("ansible.builtin.include_tasks", "")
        words: dict[str, Any] = {"file": include} if isinstance(include, str) else include
        # Who is included has the tags that are applied, and not those of the task that includes.
        names = [words["file"]] if "{{" not in words["file"] else []
        for inner in filter(None, names):
            found += included(role, inner, inherited | tags_of(words.get("apply", {})))
        found.append({**task, "tags": tags})
    return found


def test_every_task_has_a_step(entry: dict[str, Any]) -> None:
    """What has none is left out whenever a step is named."""
    for task in included(entry["role"]):
        assert task["tags"], f"roles/{entry['role']}: {task['name']}: needs tags"


def test_what_restarts_belongs_to_run_alone(entry: dict[str, Any]) -> None:
    """Who says --tags install wants packages, and no PC that starts again."""
    for task in included(entry["role"]):
        service = task.get("ansible.builtin.systemd_service", {})
        if "ansible.builtin.reboot" in task or "restarted" in str(service.get("state")):
            assert task["tags"] == {"run"}, f"roles/{entry['role']}: {task['name']}: {task['tags']}"


def test_its_tasks_belong_to_steps(entry: dict[str, Any]) -> None:
    """Who says --tags preflight sees every look and every refusal, and no change."""
    for task in yaml.safe_load((tree.ROOT / f"roles/{entry['role']}/tasks/main.yml").read_text()):
        steps = tags_of(task)
        where = f"roles/{entry['role']}/tasks/main.yml: {task['name']}"
        assert steps, f"{where}: needs tags, some of {', '.join(sorted(STEPS))}"
        assert steps <= STEPS, f"{where}: {steps - STEPS}"
        changes = any(key.endswith("include_tasks") for key in task)
        assert ("preflight" in steps) != changes, (
            f"{where}: what changes something is no preflight; what looks is"
        )
