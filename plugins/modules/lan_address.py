"""An address is lent to a network card beside its others for a while, unless somebody else in the LAN has it.

card, address, prefix. The kernel takes it away again after ten minutes, whatever has become of the machine that asked.
An address that the card has for longer, by the router's lease say, is left alone. In a check nothing is lent.

The answer: owner (MAC address of the other machine that has the address, or empty), carrier (whether the card's cable
leads somewhere).
"""

from __future__ import annotations

import json
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_network import owner, read

LENT = 600  # seconds


def carrier(card: str) -> bool:
    return read(f"/sys/class/net/{card}/carrier") == "1"


def lend(module: AnsibleModule, card: str, address: str, prefix: int) -> bool:
    """Whether the card has got the address, or has it for longer now. Never for shorter: the router's lease stays."""
    said = module.run_command(["ip", "-json", "-4", "address", "show", "dev", card], check_rc=True)[1]
    entries = [entry for link in json.loads(said) for entry in link.get("addr_info", [])]
    # For ever is 4294967295 s.
    lives = [entry["valid_life_time"] for entry in entries if entry.get("local") == address]
    if any(life >= LENT for life in lives):
        return False
    life = ["valid_lft", str(LENT), "preferred_lft", str(LENT)]
    module.run_command(["ip", "address", "replace", f"{address}/{prefix}", "dev", card, *life], check_rc=True)
    return True


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "card": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "prefix": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    card, address = module.params["card"], module.params["address"]
    if not module.check_mode and not carrier(card):
        # A card that nobody has configured is switched off, and its cable says nothing.
        module.run_command(["ip", "link", "set", "dev", card, "up"], check_rc=True)
        until = time.monotonic() + 10
        while not carrier(card) and time.monotonic() < until:
            time.sleep(0.2)
    linked = carrier(card)
    has = owner(card, address) if linked else ""
    lending = linked and not has and not module.check_mode
    changed = lending and lend(module, card, address, module.params["prefix"])
    module.exit_json(changed=changed, owner=has, carrier=linked)


if __name__ == "__main__":
    main()
