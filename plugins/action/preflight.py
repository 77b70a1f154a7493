"""What stands in the way of roles, said before anything is changed: what roles/NAME/problems.py finds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import action_loader

Problems = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], list[str]]


class ActionModule(ActionBase):
    """`role: NAME` fails with the sentences of this role. `roles: [NAME, …]` only says what all of them find, in
    `problems`: role and sentence; one without problems.py refuses nothing.

    A role's problems.py has `problems(settings, node, nodes) -> [sentence, …]`: settings are the role's variables
    (meta/argument_specs.yml) without its name before them, and `check` (whether this is a check); node is what
    node_state has seen; nodes is the same of all nodes of this play by their names, as far as it is known. A role that
    is switched off (NAME_enabled) is not asked.
    """

    _VALID_ARGS = frozenset(("role", "roles"))
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        one = self._task.args.get("role", "")
        found = []
        for role in [one] if one else self._task.args["roles"]:
            if not one and not (folder_of(role) / "problems.py").is_file():
                continue
            settings = self._settings(role, variables)
            if not settings.get("enabled", True):
                continue
            node = self._look(role, variables)
            if node.get("failed") or node.get("unreachable"):
                return node
            for sentence in of_role(role)(settings, node, seen_of_all(variables)):
                found.append({"role": role, "sentence": sentence})
        if one and found:
            name = variables["inventory_hostname"]
            said = " ".join(f"{name}: {problem['sentence']}" for problem in found)
            return {
                "failed": True,
                "msg": f"{said} Nothing was changed by the role {one}.",
                "problems": found,
            }
        return {"changed": False, "problems": found}

    def _settings(self, role: str, variables: dict[str, Any]) -> dict[str, Any]:
        folder = folder_of(role)
        names = yaml.safe_load((folder / "meta/argument_specs.yml").read_text(encoding="utf-8"))
        options = names["argument_specs"]["main"].get("options", {})
        defaults = (
            self._loader.load_from_file(str(folder / "defaults/main.yml"), trusted_as_template=True) or {}
        )
        known = {**defaults, **variables}
        templar = self._templar.copy_with_new_env(available_variables=known)
        settings = {"check": self._task.check_mode}
        for name in options:
            if name in known:
                settings[name.removeprefix(f"{role}_")] = templar.template(known[name])
        return settings

    def _look(self, role: str, variables: dict[str, Any]) -> dict[str, Any]:
        task = self._task.copy()
        task.args = {"role": role}
        node_state = action_loader.get(
            "node_state", task=task, connection=self._connection, play_context=self._play_context, loader=self._loader,
            templar=self._templar, shared_loader_obj=self._shared_loader_obj,
        )  # fmt: skip
        return node_state.run(task_vars=variables)


@cache
def folder_of(role: str) -> Path:
    for place in constants.config.get_config_value("DEFAULT_ROLES_PATH"):
        if (Path(place) / role).is_dir():
            return Path(place) / role
    raise AnsibleActionFail(f"There is no role {role}.")


@cache
def of_role(role: str) -> Problems:
    path = folder_of(role) / "problems.py"
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
