"""Looks at a node for a role, or for several roles at once; an answer that still holds is not asked for again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible import constants
from ansible.errors import AnsibleActionFail, AnsibleUndefinedVariable
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import become_loader

# What a look may name: lists and switches.
LISTS = tuple("packages files texts units users groups uids mounts addresses name_servers modules".split())
SWITCHES = ("network", "firewall", "sshd", "gpu", "upgrades", "clock")
Look = dict[str, Any]


class ActionModule(ActionBase):
    """`role: NAME` looks for one role. `roles: [NAME, …]` looks for several and keeps the answer (fact node_looks),
    from which a role's own look is then served; `look: {…}` adds to what they want to see.
    `forget: true` ends that, where something was changed by another way than write_files, unit and install_packages.
    """

    _VALID_ARGS = frozenset(("role", "roles", "look", "forget"))
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        if self._task.args.get("forget"):
            return {"changed": False, "ansible_facts": {"node_looks": {}}}
        several = self._task.args.get("roles", [])
        roles = several or ([self._task.args["role"]] if "role" in self._task.args else [])
        look = merged([*map(self._look, roles), self._task.args.get("look", {})])
        kept = variables.get("ansible_facts", {}).get("node_looks")
        if not several and kept and within(look, kept["look"]):
            return {**answer_for(look, kept["seen"]), "changed": False}
        self._become_root(variables)
        seen = self._execute_module(module_name="node_state", module_args=look, task_vars=variables)
        if several and not seen.get("failed"):
            answer = {
                key: value
                for key, value in seen.items()
                if not key.startswith(("_", "ansible_facts", "invocation"))
            }
            facts = {**seen.get("ansible_facts", {}), "node_looks": {"look": look, "seen": answer}}
            return {"changed": False, "ansible_facts": facts}
        return seen

    def _look(self, role: str) -> Look:
        for place in constants.config.get_config_value("DEFAULT_ROLES_PATH"):
            path = Path(place) / role / "meta/look.yml"
            if path.is_file():
                text = yaml.safe_load(self._loader.get_text_file_contents(str(path)))
                break
        else:
            raise AnsibleActionFail(
                f"The role {role} has no meta/look.yml, so it is not known what it wants to see."
            )
        try:
            return self._templar.template(trusted(text or {}))
        except AnsibleUndefinedVariable:
            # Only the role itself knows its variables: it will ask by itself.
            if self._task.args.get("roles"):
                return {}
            raise

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


def trusted(value: Any) -> Any:
    """The role's own file: its templates are to be filled in."""
    from ansible.template import trust_as_template

    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, dict):
        return {key: trusted(entry) for key, entry in value.items()}
    return [trusted(entry) for entry in value] if isinstance(value, list) else value


def answer_for(look: Look, seen: dict[str, Any]) -> dict[str, Any]:
    """What was seen for several, for one of them: a package that another one lacks is not its own."""
    return {**seen, "missing": [name for name in seen["missing"] if name in look.get("packages", [])]}


def merged(looks: list[Look]) -> Look:
    together: Look = {}
    for look in looks:
        for key, value in look.items():
            if key in LISTS:
                together[key] = list(dict.fromkeys([*together.get(key, []), *value]))
            else:
                together[key] = together.get(key, False) or value
    return together


def within(look: Look, wider: Look) -> bool:
    lists = all(set(look.get(key, [])) <= set(wider.get(key, [])) for key in LISTS)
    return lists and all(wider.get(key) or not look.get(key) for key in SWITCHES)
