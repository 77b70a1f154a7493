"""What every role declares is what it uses, and what its README says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import pytest
import role_tables
import tree
import yaml


class AnyTag(yaml.SafeLoader):
    """Reads !vault, !unsafe and the like as plain text."""


AnyTag.add_multi_constructor("!", lambda loader, suffix, node: getattr(node, "value", None))


def read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=AnyTag) if path.exists() else None  # noqa: S506


def specs(role: Path) -> dict[str, Any]:
    path = role / "meta/argument_specs.yml"
    assert path.exists(), f"{tree.relative(path)} is missing: declare the role's variables there"
    return read(path)["argument_specs"]


def options_of(role: Path) -> dict[str, dict[str, Any]]:
    """Of all its entry points."""
    return {name: option for spec in specs(role).values() for name, option in spec.get("options", {}).items()}


@pytest.fixture(params=tree.roles(), ids=lambda role: role.name)
def role(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_what_is_declared_has_a_default_or_is_required(role: Path) -> None:
    options = options_of(role)
    optional = {name for name, option in options.items() if not option.get("required")}
    defaults = set(read(role / "defaults/main.yml") or {})
    assert optional == defaults, (
        f"roles/{role.name}: {sorted(optional - defaults)} lack a default in defaults/main.yml (or `required: true` in "
        f"meta/argument_specs.yml), and {sorted(defaults - optional)} have one without being declared"
    )
    twice = [name for name, option in options.items() if "default" in option]
    assert not twice, f"roles/{role.name}: the defaults of {twice} stand in defaults/main.yml alone"


def test_role_has_a_scenario(role: Path) -> None:
    scenario = role / "molecule/default"
    names = ("molecule.yml", "inventory.yml", "converge.yml", "verify.yml")
    missing = [tree.relative(scenario / name) for name in names if not (scenario / name).exists()]
    assert not missing, f"{missing} are missing: see roles/base/molecule"


def test_no_two_scenarios_want_the_same_address() -> None:
    """They run side by side."""
    wanted = [
        (address, tree.relative(path))
        for path in tree.ROOT.glob("roles/*/molecule/*/inventory.yml")
        for address in re.findall(r"_address: (198\.18\.[\d.]+)", path.read_text(encoding="utf-8"))
    ]
    assert len(wanted) > len(tree.roles())
    twice = sorted(one for one in wanted if sum(one[0] == other[0] for other in wanted) > 1)
    assert not twice, "\n".join(f"{address}: {where}" for address, where in twice)


def test_every_option_is_described_and_carries_the_roles_name(role: Path) -> None:
    for entry_point, spec in specs(role).items():
        assert spec.get("short_description"), f"roles/{role.name}: {entry_point} has no short_description"
        for name, option in spec.get("options", {}).items():
            where = f"roles/{role.name}/meta/argument_specs.yml: {name}"
            assert name.startswith(f"{role.name}_"), f"{where} must begin with {role.name}_"
            assert option.get("type"), f"{where} has no type"
            assert option.get("description"), f"{where} has no description"


def test_readme_has_the_table(role: Path) -> None:
    readme = role / "README.md"
    assert readme.exists(), f"{tree.relative(readme)} is missing"
    assert role_tables.BETWEEN.search(readme.read_text(encoding="utf-8")), (
        f"{tree.relative(readme)} has no place for the table of variables: "
        "put the lines `<!-- variables -->` and `<!-- /variables -->` into it, then `make docs`"
    )
    current, wanted = role_tables.current_and_wanted(role)
    assert current == wanted, f"{tree.relative(readme)} does not say what the specs say: run `make docs`"


class AnyName(dict[str, Any]):
    """Ansible's filters and tests are not Jinja's: here every name is one, since nothing is rendered."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, print)


def variables(text: str, path: Path) -> set[str]:
    """The variables that a Jinja text reads from outside."""
    environment = jinja2.Environment(extensions=["jinja2.ext.do"])  # noqa: S701  (nothing is rendered)
    environment.filters = AnyName(environment.filters)
    environment.tests = AnyName(environment.tests)
    try:
        return jinja2.meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateSyntaxError as error:
        pytest.fail(f"{tree.relative(path)}: not valid Jinja: {error.message} in {text.strip()[:200]!r}")


def test_a_scenario_lets_systemd_judge_every_unit(role: Path) -> None:
    """How much it could reach: tests/roles/exposure.yml. A unit that has to reach much says why."""
    judged = "".join(path.read_text(encoding="utf-8") for path in role.glob("molecule/default/**/*.yml"))
    open_to_all = [
        tree.relative(path)
        for path in (*role.glob("files/*.service"), *role.glob("templates/*.service.j2"))
        if "# Not closed like our other units: " not in path.read_text(encoding="utf-8")
        and f"exposure_unit: {path.name.removesuffix('.j2').replace('@.', '@0.')}" not in judged
    ]
    assert not open_to_all, f"{open_to_all}: include tests/roles/exposure.yml in verify.yml"


def tasks_of(value: Any) -> Iterator[dict[str, Any]]:
    """Every task of a file, those in blocks and plays too."""
    if isinstance(value, list):
        for entry in value:
            yield from tasks_of(entry)
    elif isinstance(value, dict):
        yield value
        for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers"):
            yield from tasks_of(value.get(key))


def test_what_a_node_has_made_is_unpacked_by_nobody() -> None:
    """What one node packs and root unpacks on another makes the first one root there."""
    fetched = "fetch", "ansible.builtin.fetch"
    unpacked = [
        f"{tree.relative(path)}: {task.get('name')}"
        for path in [*tree.ROOT.glob("roles/*/tasks/*.yml"), *tree.ROOT.glob("playbooks/**/*.yml")]
        for task in tasks_of(read(path))
        if any(name in task for name in fetched)
    ]
    sentence = "what the controller takes from a node is data, and goes to no other as root"
    assert not unpacked, f"{unpacked}: {sentence}"
