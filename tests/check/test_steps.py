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


def test_its_tasks_belong_to_steps(entry: dict[str, Any]) -> None:
    """Who says --tags preflight sees every look and every refusal, and no change."""
    for task in yaml.safe_load((tree.ROOT / f"roles/{entry['role']}/tasks/main.yml").read_text()):
        tags = task.get("tags", [])
        steps = {tags} if isinstance(tags, str) else set(tags)
        where = f"roles/{entry['role']}/tasks/main.yml: {task['name']}"
        assert steps, f"{where}: needs tags, some of {', '.join(sorted(STEPS))}"
        assert steps <= STEPS, f"{where}: {steps - STEPS}"
        changes = any(key.endswith("include_tasks") for key in task)
        assert ("preflight" in steps) != changes, (
            f"{where}: what changes something is no preflight; what looks is"
        )
