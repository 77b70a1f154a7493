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


def steps_of(value: Any) -> set[str]:
    return ({value} if isinstance(value, str) else set(value)) & STEPS


def risky_steps(role: str, file: str, above: set[str]) -> list[tuple[str, set[str]]]:
    """Every task that can cut the connection, with the steps that reach it. above: those of whoever includes it."""
    found = []
    for task in yaml.safe_load((tree.ROOT / f"roles/{role}/tasks/{file}").read_text()):
        steps = above | steps_of(task.get("tags", []))
        for key, value in task.items():
            name = (
                value if isinstance(value, str) else value.get("file", "") if isinstance(value, dict) else ""
            )
            if (
                key.endswith(("include_tasks", "import_tasks"))
                and (tree.ROOT / f"roles/{role}/tasks/{name}").is_file()
            ):
                applied = (
                    steps_of(value.get("apply", {}).get("tags", [])) if isinstance(value, dict) else set()
                )
                # What is included dynamically has its own tags only, and those that are applied.
                inherited = steps if key.endswith("import_tasks") else above | applied
                found += risky_steps(role, name, inherited)
            elif key.endswith("include_role") and value.get("tasks_from", "").startswith("change"):
                found.append((task["name"], steps))
    return found


def test_only_configure_can_cut_the_connection(entry: dict[str, Any]) -> None:
    """Who asks for programs (--tags install) gets no new address, rules or sshd with them."""
    for name, steps in risky_steps(entry["role"], "main.yml", set()):
        assert steps == {"configure"}, f"roles/{entry['role']}: {name!r} belongs to {sorted(steps)}"


def test_what_can_cut_the_connection_is_found() -> None:
    risky = {entry["role"] for entry in roles_of_site() if risky_steps(entry["role"], "main.yml", set())}
    assert risky == {"static_network", "firewall", "sshd"}
