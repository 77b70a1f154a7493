"""Every role of site.yml can be run alone, left out on a host, and step by step."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml

STEPS = {"preflight", "install", "configure", "run"}
# The others' way to change something: without it they could not. Its README says so.
WITHOUT_SWITCH = {"rollback"}
# What is done as a whole: a driver with its restart, an address, a time daemon in place of another one, a release.
ONE_PIECE = {"network", "trainer"}
# What a module does, as a step: the one that a task with it must have, and must not have.
MODULES = {
    "apt": ("install", {"configure", "run"}),
    "systemd_service": ("run", set()),
    "template": ("configure", {"run"}),
    "copy": ("configure", {"run"}),
}


@dataclass(frozen=True)
class Step:
    """A task, and the steps that reach it: its own tags, and those of the includes on the way to it."""

    where: str
    task: dict[str, Any]
    own: frozenset[str]
    reached: frozenset[str]


def listed(tags: Any) -> frozenset[str]:
    return frozenset([tags] if isinstance(tags, str) else tags or [])


def steps_of(path: Path, inherited: frozenset[str], reached: frozenset[str]) -> Iterator[Step]:
    """Every task below a file of tasks, with what `apply` hands down."""
    yield from steps_among(yaml.safe_load(path.read_text()), path, inherited, reached)


def steps_among(
    tasks: list[dict[str, Any]], path: Path, inherited: frozenset[str], reached: frozenset[str]
) -> Iterator[Step]:
    """The tags of include_tasks are its own: what it includes has only those of `apply`, and of what is around it."""
    for task in tasks:
        where = f"{tree.relative(path)}: {task.get('name', 'a block')}"
        tags = listed(task.get("tags")) | inherited
        include = task.get("ansible.builtin.include_tasks")
        static = task.get("ansible.builtin.import_tasks")
        yield Step(where, task, tags, reached)
        if "block" in task:
            parts = [inner for part in ("block", "rescue", "always") for inner in task.get(part, [])]
            yield from steps_among(parts, path, tags, reached)
        elif static:
            yield from steps_of(path.parent / static, tags, reached)
        elif include:
            words: dict[str, Any] = {"file": include} if isinstance(include, str) else include
            handed = listed(words.get("apply", {}).get("tags"))
            # One of several, by an expression: all that it names.
            for name in [f"{name}.yml" for name in re.findall(r"'(\w+)'", words["file"])] or [words["file"]]:
                yield from steps_of(path.parent / name, inherited | handed, reached & tags)
        elif "ansible.builtin.include_role" in task:
            included = task["ansible.builtin.include_role"]
            handed = listed(included.get("apply", {}).get("tags"))
            if included == {"name": "service"}:
                yield from steps_of(tree.ROOT / "roles/service/tasks/main.yml", inherited, reached & tags)
                continue
            yield Step(f"{where} (what it includes)", {}, inherited | handed, reached & tags)


def steps_in(role: str) -> Iterator[Step]:
    return steps_of(tree.ROOT / f"roles/{role}/tasks/main.yml", frozenset(), frozenset(STEPS))


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


@pytest.mark.parametrize("role", "nfs run_copies object_storage notify tensorboard gpu_watch overlay".split())
def test_what_is_switched_off_goes_where_it_was(role: str) -> None:
    includes = [str(step.task.get("ansible.builtin.include_tasks")) for step in steps_in(role)]
    assert any("remove.yml" in include for include in includes), (
        f"roles/{role}/tasks/main.yml never removes it"
    )


def test_its_tasks_belong_to_the_steps_that_they_are(role: str) -> None:
    """docs/operations.md, "One role, one step": who says --tags configure starts nothing and installs nothing.

    What restarts is run alone; only configure can cut the connection. Without a step, no step runs it.
    """
    for step in steps_in(role):
        if "ansible.builtin.meta" in step.task or ("block" in step.task and not step.own):
            continue  # the tasks of the block have their own
        own = step.own & STEPS
        assert own, f"{step.where}: needs tags, some of {', '.join(sorted(STEPS))}"
        assert own <= step.reached, f"{step.where}: --tags {', '.join(own - step.reached)} stops before it"
        service = step.task.get("ansible.builtin.systemd_service", {})
        if "ansible.builtin.reboot" in step.task or "restarted" in str(service.get("state")):
            assert step.own == {"run"}, f"{step.where}: {sorted(step.own)}"
        if cuts(step):
            assert step.own == {"configure"}, f"{step.where}: {sorted(step.own)}"
        for module, (wanted, unwanted) in MODULES.items():
            if f"ansible.builtin.{module}" in step.task and step.own != {"install"} and role not in ONE_PIECE:
                assert wanted in step.own, f"{step.where}: needs the tag {wanted}"
                assert not step.own & unwanted, f"{step.where}: is no {step.own & unwanted}"


def test_nothing_waits_for_shared_files() -> None:
    """A mount that is refused ends the run at the roles about it: all others come before them."""
    assert list(IMPORTS)[-2:] == ["nfs", "run_copies"]


def test_what_ends_by_itself_is_waited_for() -> None:
    """`state: started` is content with a oneshot service that is still starting, or that has been and gone."""
    units = [*tree.ROOT.glob("roles/*/templates/*.service.j2"), *tree.ROOT.glob("roles/*/files/*.service")]
    once = {
        path.name.removesuffix(".j2")
        for path in units
        if "Type=oneshot" in path.read_text() and "RemainAfterExit=yes" not in path.read_text()
    }
    assert "aura-shared-directory.service" in once
    for path in tree.ROOT.glob("roles/*/tasks/*.yml"):
        for task in yaml.safe_load(path.read_text()):
            service = task.get("ansible.builtin.systemd_service", {})
            assert service.get("name") not in once or "state" not in service, (
                f"{tree.relative(path)}: {task['name']}: systemctl start waits for it, this module does not"
            )


def cuts(step: Step) -> bool:
    """Whether the task can cut the connection."""
    return step.task.get("ansible.builtin.include_role", {}).get("tasks_from", "").startswith("change")


def test_what_can_cut_the_connection_is_found() -> None:
    assert {role for role in IMPORTS if any(map(cuts, steps_in(role)))} == {"network", "firewall", "sshd"}
