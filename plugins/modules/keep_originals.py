"""Keeps how a node was before a role first changes it (node_state: forget)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: keep_originals
author: Aura
short_description: Keeps how a node was before a role first changes it
description:
  - Copies what a role is going to replace into C(/var/backups/aura/originals), and writes down in the C(manifest.json)
    beside it what was there, once. M(put_back) takes it back.
options:
  role: {description: The role that asks., type: str, required: true}
  makes:
    description: >-
      Absolute paths that the role makes or replaces. One that ends with C(/) is a directory that goes with all that is
      in it; one with C(*) stands for the files that fit it now.
    type: list
    elements: str
    default: []
  packages: {description: Packages that the role may install., type: list, elements: str, default: []}
  users: {description: Users that the role may make., type: list, elements: str, default: []}
  units:
    description: Units that are started again when the role's files are put back.
    type: list
    elements: str
    default: []
attributes:
  check_mode: {support: none}
"""
EXAMPLES = r"""
- name: Keep what the role time_sync replaces
  keep_originals:
    role: time_sync
    makes: [/etc/chrony/chrony.conf]
"""
RETURN = r"""
kept: {description: Paths that are new in the manifest., type: list, elements: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_originals import keep
from ansible.module_utils.node_packages import missing


def main() -> None:
    lists = {
        name: {"type": "list", "elements": "str", "default": []}
        for name in "makes packages users units".split()
    }
    module = AnsibleModule(argument_spec={"role": {"type": "str", "required": True}, **lists})
    asked = module.params
    kept = keep(asked["role"], asked["makes"], missing(asked["packages"]), asked["users"], asked["units"])
    module.exit_json(changed=False, kept=kept)


if __name__ == "__main__":
    main()
