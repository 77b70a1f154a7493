"""What stands in the way of roles, said before anything is changed: what roles/NAME/problems.py finds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import action_loader

NodeState = action_loader.get("node_state", class_only=True)
Problems = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], list[str]]
SHALL_BE = {
    "bool": "true or false", "int": "a whole number", "path": "a directory",
    "list": "a list (in brackets, or a line each)", "dict": "names with values",
}  # fmt: skip


class ActionModule(NodeState):
    """`role: NAME` fails with the sentences of this role, or answers what node_state has seen for it.
    `roles: [NAME, …]` only says what all of them find, in `problems`: role and sentence; one without problems.py
    refuses nothing, and one in whose way nothing stands is not asked again until something changes.

    A role's problems.py has `problems(settings, node, nodes) -> [sentence, …]`: settings are the role's variables
    without its name before them, each of the type that meta/argument_specs.yml names, `check` (whether this is a check)
    and `hostname`; node is what node_state has seen; nodes is the same of all nodes of this play by their names, as far
    as it is known. A role that is switched off (NAME_enabled) is not asked, and none whose variables are of another
    type.
    """

    _VALID_ARGS = frozenset(("role", "roles"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        ActionBase.run(self, tmp, task_vars)
        variables = task_vars or {}
        one = self._task.args.get("role", "")
        looks = variables.get("ansible_facts", {}).get("node_looks") or {}
        if one in looks.get("clear", []) and (node := self.kept(self.look_of(one), variables)):
            return {**node, "problems": []}
        found, node = [], {}
        for role in [one] if one else self._task.args["roles"]:
            if not one and not (self.folder_of(role) / "problems.py").is_file():
                continue
            settings, strange = self._settings(role, variables)
            enabled = settings.get("enabled", True)
            if enabled and strange:
                found += [{"role": role, "sentence": sentence} for sentence in strange]
            elif enabled or (one and self._task.register):  # to take back what it has made
                node = self.seen(self.look_of(role), variables)
                if node.get("failed") or node.get("unreachable"):
                    return node
                said = of_role(role)(settings, node, seen_of_all(variables)) if enabled else []
                found += [{"role": role, "sentence": sentence} for sentence in said]
        if one and found:
            name = variables["inventory_hostname"]
            said = " ".join(f"{name}: {problem['sentence']}" for problem in found)
            return {
                "failed": True,
                "msg": f"{said} Nothing was changed by the role {one}.",
                "problems": found,
            }
        answer = {"changed": False, "problems": found}
        if looks and not one:
            clear = set(self._task.args["roles"]) - {problem["role"] for problem in found}
            answer["ansible_facts"] = {"node_looks": {**looks, "clear": sorted(clear)}}
        return {**(node if one else {}), **answer}

    def _settings(self, role: str, variables: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        folder = self.folder_of(role)
        names = yaml.safe_load((folder / "meta/argument_specs.yml").read_text(encoding="utf-8"))
        options = names["argument_specs"]["main"].get("options", {})
        defaults = (
            self._loader.load_from_file(str(folder / "defaults/main.yml"), trusted_as_template=True) or {}
        )
        known = {**defaults, **variables}
        templar = self._templar.copy_with_new_env(available_variables=known)
        settings: dict[str, Any] = {
            "check": self._task.check_mode,
            "hostname": variables["inventory_hostname"],
        }
        strange = []
        for name, option in options.items():
            if name in known:
                value, problem = converted(name, option, templar.template(known[name]), known[name])
                settings[name.removeprefix(f"{role}_")] = value
                strange += [problem] if problem else []
        return settings, strange


def converted(name: str, option: dict[str, Any], value: Any, written: Any) -> tuple[Any, str]:
    """A variable's value as its type, and a sentence where it cannot be that ("" otherwise). written: its template."""
    kind = option.get("type", "str")
    # What begins with ~ means another directory on a node than here. Without a value only a text has one: "".
    option = {**option, "type": "str"} if kind == "path" else option
    value = "" if value is None and kind == "str" else value
    result = ArgumentSpecValidator({name: option}).validate({name: value})
    # A text would be taken apart into a list here, and the role goes through its letters.
    fits = isinstance(value, {"list": list, "dict": dict}.get(kind, object)) and not result.error_messages
    if fits and (value is not None or kind == "raw"):
        return result.validated_parameters[name], ""
    of = re.fullmatch(r"\{\{ *(\w+) *\}\}", str(written))
    it = f"{name} ({of[1]})" if of else name
    choices = ", ".join(option.get("choices", []))
    shall = f"one of {choices}" if choices else SHALL_BE.get(kind, "a text")
    each = f", each {SHALL_BE.get(option['elements'], 'a text')}" if "elements" in option else ""
    shown = (
        "empty"
        if value is None
        else "another thing (not shown: a secret)"
        if option.get("no_log")
        else repr(value)
    )
    return value, f"{it} is {shown}; it has to be {shall}{each}."


@cache
def of_role(role: str) -> Problems:
    path = NodeState.folder_of(role) / "problems.py"
    spec = importlib.util.spec_from_file_location(f"aura_problems_{role}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise AnsibleActionFail(f"The role {role} has no problems.py.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.problems


def seen_of_all(variables: dict[str, Any]) -> dict[str, Any]:
    hosts = variables.get("hostvars", {})
    looks = {
        name: hosts[name].get("ansible_facts", {}).get("node_looks")
        for name in variables.get("ansible_play_hosts", [])
    }
    return {name: look["seen"] for name, look in looks.items() if look}
