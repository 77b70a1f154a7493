"""Every role of site.yml can be run alone, left out on a host, and step by step."""

from typing import Any

import pytest
import tree
import yaml

# The others' way to change something: without it they could not. Its README says so.
WITHOUT_SWITCH = {"rollback"}


def listed(tags: Any) -> frozenset[str]:
    return frozenset([tags] if isinstance(tags, str) else tags or [])


def imports_of_site() -> dict[str, dict[str, Any]]:
    """The tasks of site.yml that import roles, by these."""
    plays = yaml.safe_load((tree.ROOT / "playbooks/site.yml").read_text())
    tasks = [task for play in plays if "pre_tasks" in play for task in play["tasks"]]
    found = {task["ansible.builtin.import_role"]["name"]: task for task in tasks}
    assert len(found) == len(tasks), "site.yml imports a role twice"
    return found


IMPORTS = imports_of_site()


@pytest.fixture(params=IMPORTS)
def role(request: pytest.FixtureRequest) -> str:
    return request.param


def test_it_has_its_name_as_a_tag(role: str) -> None:
    assert role in listed(IMPORTS[role]["tags"]), f"playbooks/site.yml: {role} needs tags: {role}"


def test_it_has_a_switch(role: str) -> None:
    if role in WITHOUT_SWITCH:
        assert "has no switch" in (tree.ROOT / f"roles/{role}/README.md").read_text()
        return
    specs = yaml.safe_load((tree.ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())
    assert f"{role}_enabled" in specs["argument_specs"]["main"]["options"]
    tasks = (tree.ROOT / f"roles/{role}/tasks/main.yml").read_text()
    assert f"when: {role}_enabled" in tasks, f"roles/{role}/tasks/main.yml does not heed {role}_enabled"


def test_nothing_waits_for_shared_files() -> None:
    """A mount that is refused ends the run at the roles about it: all others come before them."""
    assert list(IMPORTS)[-2:] == ["nfs", "run_copies"]
