"""Puts back what a node was before roles changed it (playbooks/reset.yml)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: put_back
author: Aura
short_description: Puts back what a node was before roles changed it
description:
  - Files that were replaced come back from C(/var/backups/aura/originals), what was made goes; see M(keep_originals).
  - What goes is kept in C(/var/backups/aura/reset-TIME). In check mode it only says what it would do.
options:
  roles: {description: Whose changes; empty for those of all roles., type: list, elements: str, default: []}
  leave: {description: Roles whose changes stay., type: list, elements: str, default: []}
  as_change:
    description: Change nothing, and say what there is to do as O(files) of the role safe_change.
    type: bool
    default: false
attributes:
  check_mode: {support: full}
"""
EXAMPLES = r"""
- name: The time is the distribution's own again
  put_back:
    roles: [time_sync]
"""
RETURN = r"""
done: {description: "What was done, or would be: path, role and what.", type: list, elements: dict, returned: always}
files: {description: The same for the role safe_change., type: list, elements: dict, returned: with O(as_change)}
packages: {description: Packages that came with the roles and stay., type: list, elements: str, returned: always}
went: {description: Where the files that went lie now., type: str, returned: always}
data:
  description: Where runs and corpora lie, if C(/var/lib/aura) was a mount of another directory; else empty.
  type: str
  returned: always
complaints: {description: Commands that failed., type: list, elements: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_originals import as_change, plan, put_back, read_manifest


def main() -> None:
    names = {name: {"type": "list", "elements": "str", "default": []} for name in ("roles", "leave")}
    module = AnsibleModule(
        argument_spec={**names, "as_change": {"type": "bool", "default": False}}, supports_check_mode=True
    )
    roles, leave = module.params["roles"], module.params["leave"]
    known = {"packages": sorted(read_manifest()["packages"]), "went": "", "data": "", "complaints": []}
    if module.params["as_change"]:
        module.exit_json(changed=False, **known, done=plan(roles, leave), files=as_change(roles))
    if module.check_mode:
        steps = plan(roles, leave)
        module.exit_json(
            changed=any(not step["what"].startswith("stays") for step in steps), **known, done=steps
        )
    result = put_back(roles, leave)
    changed = any(not step["what"].startswith("stays") for step in result["done"])
    module.exit_json(changed=changed, **{**known, **result})


if __name__ == "__main__":
    main()
