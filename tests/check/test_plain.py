"""The Ansible half is plain Ansible: names of tasks, files of roles, plugins with a reason (docs/decisions)."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree
from test_roles import read, tasks_of

VERBS = {
    *"Add Apply Arm Ask Assert Authorize Back Build Check Collect Compare Configure Confirm Connect Copy".split(),
    *"Create Delete Disable Distribute Download Enable Export Fetch Fill Find Follow Gather Give Install Keep".split(),
    *"Launch Let Limit Link Load Look Make Mount Move Print Prove Pull Read Reconnect Refresh Refuse Release".split(),
    *"Reload Remove Report Reset Restart Restore Resume Run Save Say Set Show Start Stop Synchronize Take Undo".split(),
    *"Unmount Update Upgrade Validate Verify Wait Write".split(),
}
PLAYBOOKS = tree.ROOT / "playbooks"
FOLDERS = {"defaults", "files", "handlers", "meta", "molecule", "tasks", "templates", "vars"}


def names(path: Path) -> Iterator[str]:
    for task in tasks_of(read(path)):
        if isinstance(task.get("name"), str) and "ansible.builtin.import_playbook" not in task:
            yield task["name"]


def of_playbooks() -> list[Path]:
    return [*PLAYBOOKS.glob("*.yml"), *PLAYBOOKS.glob("tasks/*.yml")]


def test_task_names_begin_with_a_verb() -> None:
    paths = [
        path
        for role in tree.roles()
        for part in ("tasks", "handlers")
        for path in (role / part).glob("*.yml")
    ]
    paths += [path for path in of_playbooks()]
    wrong = [
        f"{tree.relative(path)}: {name}"
        for path in paths
        for name in names(path)
        if name.split()[0].rstrip(",") not in VERBS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("role", tree.roles(), ids=lambda role: role.name)
def test_a_role_has_the_folders_of_a_role(role: Path) -> None:
    """No module, filter or program of its own beside Ansible's."""
    found = {path.name for path in role.iterdir() if path.is_dir()} - FOLDERS - {"__pycache__"}
    assert not found, f"{tree.relative(role)}: {sorted(found)}"
    meta = {path.name for path in (role / "meta").iterdir()}
    assert meta == {"argument_specs.yml"}, f"{tree.relative(role)}/meta: {sorted(meta)}"


def test_every_synchronize_checks_the_host_key() -> None:
    """By itself it takes any machine for the node, sees no known_hosts of ours and no port that is a template."""
    found = 0
    for path in [*tree.ROOT.glob("roles/*/tasks/*.yml"), *tree.ROOT.glob("playbooks/**/*.yml")]:
        for task in tasks_of(read(path)):
            if settings := task.get("ansible.posix.synchronize"):
                found += 1
                where = f"{tree.relative(path)}: {task['name']}"
                assert settings.get("verify_host") and settings.get("use_ssh_args"), where
                assert "ansible_port" in str(settings.get("dest_port")), where
    assert found


def test_every_decision_is_a_page_with_what_is_given_up() -> None:
    pages = sorted((tree.ROOT / "docs/decisions").glob("*.md"))
    assert pages
    for number, page in enumerate(pages, start=1):
        assert page.name.startswith(f"{number:04}-"), tree.relative(page)
        text = page.read_text(encoding="utf-8")
        for heading in ("Context", "Decision", "What is given up"):
            assert re.search(rf"^## {heading}$", text, re.MULTILINE), (
                f"{tree.relative(page)} has no {heading!r}"
            )


# What a person gives with -e wins over a task's variable of the same name.
GIVEN = set("preset corpus run text dataset image hours steps script env wait cpu lr lines".split())


@pytest.mark.parametrize("role", tree.roles(), ids=lambda role: role.name)
def test_variables_of_tasks_are_not_what_people_give(role: Path) -> None:
    found = {
        name
        for path in role.glob("tasks/*.yml")
        for task in tasks_of(read(path))
        for name in task.get("vars") or {}
    }
    assert not found & GIVEN, f"roles/{role.name}: {sorted(found & GIVEN)}"
