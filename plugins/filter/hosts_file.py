"""What /etc/hosts of a node should be (role node_name), from what it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Ours, whatever follows on the first and the last line.
BLOCK = re.compile(r"^# BEGIN aura cluster\b.*?^# END aura cluster\b[^\n]*\n?", re.MULTILINE | re.DOTALL)
# Where installers let the PC's own name lead: no peer can reach a node that thinks it lives there.
OWN_NAME = re.compile(r"^[ \t]*127\.0\.1\.1[ \t].*\n?", re.MULTILINE)


def others_lines(text: str) -> str:
    """What in the file is not ours and stays."""
    return OWN_NAME.sub("", BLOCK.sub("", text))


def hosts_file(text: str, addresses: Mapping[str, str]) -> str:
    """The file with every node's name in a block at its end, and without 127.0.1.1.

    addresses: node name -> address.
    """
    block = [
        "# BEGIN aura cluster (Ansible, role node_name)",
        *(f"{address} {name}" for name, address in addresses.items()),
        "# END aura cluster",
    ]
    return "\n".join([others_lines(text).rstrip(), "", *block]).lstrip() + "\n"


def hosts_file_strangers(text: str, addresses: Mapping[str, str]) -> list[str]:
    """The lines of others in which a node's name leads to another address than its own."""
    wanted = {name.lower(): address for name, address in addresses.items()}
    found = []
    for line in others_lines(text).splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if any(wanted.get(name.lower(), address) != address for name in names):
            found.append(" ".join(line.split()))
    return found


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"hosts_file": hosts_file, "hosts_file_strangers": hosts_file_strangers}
