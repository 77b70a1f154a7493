"""Fills in the templates of a role's files, and has those that differ written (see the module of the same name)."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader, lookup_loader

FROM = {"template": "ansible.builtin.template", "copy": "ansible.builtin.file"}


class ActionModule(ActionBase):
    """`template` and `copy` name a file of the role, in templates/ and files/; the node gets its text.

    Nobody is asked where node_state has just seen that all of them are as they shall be.
    """

    _VALID_ARGS = frozenset(("files",))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        files = [self._filled(file, variables) for file in self._task.args["files"]]
        kept = variables.get("ansible_facts", {}).get("node_looks")
        seen = kept["seen"]["files"] if kept else {}
        as_it_shall_be = filter_loader.get("as_it_shall_be").j2_function
        if all(file["path"] in seen and as_it_shall_be(file, seen[file["path"]]) for file in files):
            return {"changed": False, "paths": []}
        return self._execute_module("write_files", {"files": files}, task_vars=variables)

    def _filled(self, file: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        text = (*FROM, "content") if file.get("absent") else FROM
        filled = {key: value for key, value in file.items() if key not in text}
        for key, lookup in FROM.items():
            if key in file and not file.get("absent"):
                look = lookup_loader.get(lookup, loader=self._loader, templar=self._templar)
                options = {"rstrip": False} if key == "copy" else {}
                filled["content"] = look.run([file[key]], variables=variables, **options)[0]
        return filled
