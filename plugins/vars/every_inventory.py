"""Variables that every inventory has, from inventory/group_vars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.inventory.group import Group
from ansible.inventory.host import Host
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.vars import BaseVarsPlugin
from ansible.utils.vars import combine_vars

DOCUMENTATION = """
name: every_inventory
author: Aura
short_description: Gives every inventory the variables in inventory/group_vars
description:
  - An inventory that lies anywhere gets the variables of C(inventory/group_vars/GROUP/) for its groups of these names.
  - Every host has its name in C(cluster_host_name).
  - Whatever the inventory says itself, in its hosts.yml or its own group_vars, wins over them.
options:
  stage:
    description:
      - When the variables are loaded. Once, when the inventory has been read, they lie below those of host_group_vars,
        which are loaded later, and cost nothing afterwards.
    type: str
    choices: [all, task, inventory]
    default: inventory
"""

SHARED = Path(__file__).resolve().parents[2] / "inventory/group_vars"


class VarsModule(BaseVarsPlugin):
    """Loads our variables for groups, leaving out what the inventory's file says of the group or of one above it."""

    REQUIRES_ENABLED = True
    is_stateless = True

    def get_vars(
        self, loader: DataLoader, path: str, entities: Group | Host | list[Group | Host], cache: bool = True
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entity in entities if isinstance(entities, list) else [entities]:
            if isinstance(entity, Group):
                # What a group above has from us is none of its own: `wsl` says otherwise than `all`.
                own = {
                    name
                    for group in [entity, *entity.get_ancestors()]
                    for name in group.vars.keys() - ours(loader, group)
                }
                found |= {
                    name: value for name, value in shared(loader, entity.name).items() if name not in own
                }
            else:
                # Where a task is delegated, inventory_hostname is not the host that we log in to; this is.
                found["cluster_host_name"] = entity.name
        return found


def ours(loader: DataLoader, group: Group) -> set[str]:
    """The names of those variables that the group has from us."""
    return {name for name, value in shared(loader, group.name).items() if group.vars.get(name) == value}


def shared(loader: DataLoader, group: str) -> dict[str, Any]:
    """What inventory/group_vars says of the group; the loader reads each file once."""
    found: dict[str, Any] = {}
    for file in loader.find_vars_files(str(SHARED), group) if SHARED.is_dir() else []:
        found = combine_vars(
            found, loader.load_from_file(file, cache="all", unsafe=True, trusted_as_template=True) or {}
        )
    return found
