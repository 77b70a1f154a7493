"""Looks at a node for a role, or for several roles at once; an answer that still holds is not asked for again."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleActionFail, AnsibleUndefinedVariable
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import become_loader

Look = dict[str, Any]  # lists and switches


class ActionModule(ActionBase):
    """`role: NAME` looks for one role. `roles: [NAME, …]` looks for several and keeps the answer (fact node_looks),
    from which a role's own look is then served; `look: {…}` adds to what they want to see.
    `forget: true` ends that, where something was changed by another way than write_files and unit.
    """

    _VALID_ARGS = frozenset(("role", "roles", "look", "forget"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        if self._task.args.get("forget"):
            return {"changed": False, "ansible_facts": {"node_looks": {}}}
        more = self._task.args.get("look", {})
        if "roles" not in self._task.args:
            look = self.look_of(self._task.args["role"]) if "role" in self._task.args else {}
            return self.seen(merged([look, more]), variables)
        looks = []
        for role in self._task.args["roles"]:
            if not (self.folder_of(role) / "meta/look.yml").is_file():
                continue  # it is written in plain Ansible
            # Where only the role itself knows its variables, it will ask by itself.
            with suppress(AnsibleUndefinedVariable):
                looks.append(self.look_of(role))
        look = merged([*looks, more])
        seen = self._ask(look, variables)
        if seen.get("failed"):
            return seen
        answer = {
            key: value
            for key, value in seen.items()
            if not key.startswith(("_", "ansible_facts", "invocation"))
        }
        facts = {**seen.get("ansible_facts", {}), "node_looks": {"look": look, "seen": answer}}
        return {"changed": False, "ansible_facts": facts}

    def seen(self, look: Look, variables: dict[str, Any]) -> dict[str, Any]:
        """What the module of the same name answers. (For other actions too.)"""
        return self.kept(look, variables) or self._ask(look, variables)

    @staticmethod
    def kept(look: Look, variables: dict[str, Any]) -> dict[str, Any]:
        """The answer that still holds; empty where the node has to be asked."""
        looks = variables.get("ansible_facts", {}).get("node_looks")
        if looks and within(look, looks["look"]):
            return {**answer_for(look, looks["seen"]), "changed": False}
        return {}

    def _ask(self, look: Look, variables: dict[str, Any]) -> dict[str, Any]:
        self._become_root(variables)
        return self._execute_module(module_name="node_state", module_args=dict(look), task_vars=variables)

    def look_of(self, role: str) -> Look:
        path = self.folder_of(role) / "meta/look.yml"
        if not path.is_file():  # a role in plain Ansible looks by itself
            return {}
        return self._templar.template(self._loader.load_from_file(str(path), trusted_as_template=True) or {})

    @staticmethod
    @cache
    def folder_of(role: str) -> Path:
        for place in constants.config.get_config_value("DEFAULT_ROLES_PATH"):
            if (Path(place) / role).is_dir():
                return Path(place) / role
        raise AnsibleActionFail(f"There is no role {role}.")

    def _become_root(self, variables: dict[str, Any]) -> None:
        """Much of the answer can be read by root only, whatever the task says."""
        if (
            self._connection.become is not None
            and self._connection.become.get_option("become_user") == "root"
        ):
            return
        become = become_loader.get("ansible.builtin.sudo")
        names = constants.config.get_plugin_vars("become", become._load_name)
        options = {name: self._templar.template(variables[name]) for name in names if name in variables}
        options["ansible_become_user"] = "root"
        become.set_options(var_options=options)
        self._connection.set_become_plugin(become)


def answer_for(look: Look, seen: dict[str, Any]) -> dict[str, Any]:
    """What was seen for several, for one of them: a package that another one lacks is not its own."""
    return {**seen, "missing": [name for name in seen["missing"] if name in look.get("packages", [])]}


def merged(looks: list[Look]) -> Look:
    together: Look = {}
    for look in looks:
        for key, value in look.items():
            if isinstance(value, list):
                together[key] = list(dict.fromkeys([*together.get(key, []), *value]))
            else:
                together[key] = together.get(key, False) or value
    return together


def within(look: Look, wider: Look) -> bool:
    return all(
        set(value) <= set(wider.get(key, [])) if isinstance(value, list) else wider.get(key) or not value
        for key, value in look.items()
    )
