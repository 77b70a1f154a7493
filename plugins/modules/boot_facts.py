"""Sets the fact `boot`: what a restart of the node meets. It changes nothing.

Ansible's setup knows nothing of that: docs/decisions/0005-cards-and-the-next-start.md. Run it as root.

ansible_facts.boot:
    passphrase       whether a person has to open a disk at each start
    live             whether this is a live system, which forgets what was installed
    windows          who starts Windows instead of this system: firmware, GRUB, or ""
    boot_entry       where it is the firmware: the number of this system's own entry, for efibootmgr
    wsl              whether this is Linux under Windows (WSL 2), which only Windows starts
    reboot_required  whether something installed waits for the next start
"""

from __future__ import annotations

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_start import in_wsl, read_start


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    required = os.path.exists("/run/reboot-required")
    boot = {**read_start(), "wsl": in_wsl(), "reboot_required": required}
    module.exit_json(changed=False, ansible_facts={"boot": boot})


if __name__ == "__main__":
    main()
