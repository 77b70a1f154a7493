"""What a Linux under Windows lacks before it can be a node."""

from __future__ import annotations

from typing import Any


def problems(settings: dict[str, Any], node: dict[str, Any], nodes: dict[str, Any]) -> list[str]:
    said = []
    if not node["units"]["sysinit.target"]["active"]:
        said.append(
            "systemd does not run in its WSL, and every service of ours is one of systemd. In its Ubuntu: printf "
            "'[boot]\\nsystemd=true\\n' | sudo tee -a /etc/wsl.conf, then in PowerShell: wsl --shutdown, and "
            "open Ubuntu again."
        )
    addresses = [address.partition("/")[0] for card in node["cards"] for address in card["addresses"]]
    if settings["address"] not in addresses:
        said.append(
            f"no network card of its Linux has the address {settings['address']}, so Windows has not been told yet. "
            f"What to type there: ansible-playbook playbooks/windows.yml --limit {settings['hostname']}."
        )
    return said
