"""Sets the fact `gpu`: the node's NVIDIA cards, and what decides about their driver. It changes nothing.

Ansible's setup knows no graphics cards: docs/decisions/0005-cards-and-the-next-start.md. Run it as root.

ansible_facts.gpu:
    cards      on the PCI bus: pci (0000:01:00.0), device_id (10de:2504), generation, capability, boot_vga, bound (the
               kernel's driver that has it, or "")
    driver     the version of the loaded driver; "" without one
    smi        the cards that nvidia-smi knows: uuid, name, pci, compute_capability, memory_mib, display_active,
               persistence, driver, power_limit, power_default, power_min, power_max [W]
    elsewhere  WSL or container, where the driver is another system's; "" otherwise
    machine    {} without a card of its own; else kernel, packages ({NAME: {version, maintainer, want}}), installed,
               dkms, run_file, nouveau, secure_boot, key_enrolled, devices: see module_utils/node_gpu.py
"""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_gpu import read_gpus


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, ansible_facts={"gpu": read_gpus()})


if __name__ == "__main__":
    main()
