"""The tables of variables in the roles' READMEs, made from meta/argument_specs.yml and defaults/main.yml.

This program writes them again (make docs); test_roles.py sees where that has been forgotten.
A README holds the table between the lines `<!-- variables -->` and `<!-- /variables -->`.
"""

import re
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parents[2] / "roles"
BETWEEN = re.compile(r"(?<=<!-- variables -->\n).*?(?=<!-- /variables -->)", re.DOTALL)


def cell(text: str) -> str:
    """The text on one line of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def default_cell(option: dict[str, Any], value: Any) -> str:
    """value: what defaults/main.yml says, or of a key of a dictionary the specs."""
    if option.get("required"):
        return "*required*"
    if value is None:
        return ""
    if value == "":
        return '`""`'
    shown = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return f"`{cell(shown.removesuffix(chr(10)).removesuffix('...').strip())}`"


def type_cell(option: dict[str, Any]) -> str:
    name = option.get("type", "str")
    if name == "list" and "elements" in option:
        name = f"list of {option['elements']}"
    return name


def rows(options: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for name, option in options.items():
        description = option.get("description", "")
        if isinstance(description, list):
            description = " ".join(description)
        if "choices" in option:
            description += f" One of {', '.join(f'`{choice}`' for choice in option['choices'])}."
        default = default_cell(option, defaults.get(name, option.get("default")))
        cells = [f"`{prefix}{name}`", type_cell(option), default, cell(description)]
        lines.append(f"| {' | '.join(cells)} |")
        # The keys of a dictionary, or of a list's dictionaries, follow it.
        inner = f"{prefix}{name}[]." if option.get("type") == "list" else f"{prefix}{name}."
        lines += rows(option.get("options", {}), {}, inner)
    return lines


def table(role: Path) -> str:
    """The text that belongs between the two marks of this role's README."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))
    path = role / "defaults/main.yml"
    defaults = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}
    parts = []
    for entry_point, spec in specs["argument_specs"].items():
        if entry_point != "main":
            parts.append(f"\nFor `tasks_from: {entry_point}`: {cell(spec.get('short_description', ''))}\n")
        lines = rows(spec.get("options", {}), defaults)
        if lines:
            header = ["| variable | type | default | meaning |", "| --- | --- | --- | --- |"]
            parts.append("\n".join(header + lines) + "\n")
        else:
            parts.append("No variables.\n")
    return "".join(parts)


def current_and_wanted(role: Path) -> tuple[str, str]:
    """The README as it is and as it should be (both the same text when it has no marks: see test_roles.py)."""
    readme = (role / "README.md").read_text(encoding="utf-8")
    return readme, BETWEEN.sub(lambda _: table(role), readme)


if __name__ == "__main__":
    for role in sorted(path for path in ROLES.iterdir() if (path / "README.md").exists()):
        current, wanted = current_and_wanted(role)
        if current != wanted:
            (role / "README.md").write_text(wanted, encoding="utf-8")
            print(f"roles/{role.name}/README.md: written")
