"""What a role makes of what it sees: its expressions alone, without a node."""

from typing import Any

import tree
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar, trust_as_template

# Lookups are found by their full names only after this.
init_plugin_loader()


def says(role: str, name: str, **variables: Any) -> Any:
    """The value of a variable of the role, with its defaults and what a look has seen."""
    known = {
        "inventory_hostname": "node1",
        "ansible_check_mode": False,
        # Where lookups find the role's templates and files.
        "ansible_search_path": [str(tree.ROOT / "roles" / role)],
    }
    return filled_in(f"{{{{ {name} }}}}", known | variables_of(role) | variables)


def variables_of(role: str) -> dict[str, Any]:
    """Its defaults and constants, as they are written."""
    known: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        if (tree.ROOT / f"roles/{role}/{part}/main.yml").exists():
            known |= loaded(f"roles/{role}/{part}/main.yml")
    return known


def loaded(path: str) -> Any:
    """A YAML file of the repository, its templates to be filled in."""
    return DataLoader().load_from_file(str(tree.ROOT / path), trusted_as_template=True, cache="none")


def filled_in(text: str, variables: dict[str, Any]) -> Any:
    """What a template makes of these variables."""
    return Templar(loader=DataLoader(), variables=variables).template(trust_as_template(text))


def preflight_sentences(role: str, node: dict[str, Any], **variables: Any) -> str:
    """What the last task of the role's preflight.yml says of a node. node: what the tasks before it have registered."""
    task = loaded(f"roles/{role}/tasks/preflight.yml")[-1]
    known = {"preflight_problems": [], "inventory_hostname": "node1"} | variables_of(role) | task["vars"]
    found = Templar(loader=DataLoader(), variables=known | node | variables).template(
        task["ansible.builtin.set_fact"]["preflight_problems"]
    )
    return " ".join(problem["sentence"] for problem in found)
