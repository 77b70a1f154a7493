"""ssh to a node at an address of one's choice, as Ansible would do it, past every connection that is open."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def options(node: Mapping[str, Any]) -> list[str]:
    """What ssh has to know about the node; node: its hostvars."""
    common = shlex.split(str(node.get("ansible_ssh_common_args", "")))
    key, port = node.get("ansible_ssh_private_key_file"), node.get("ansible_port")
    # The first of two settings counts.
    own = ["-o", "ControlPath=none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *common]
    return own + (["-i", str(key)] if key else []) + (["-p", str(port)] if port else [])


def target(node: Mapping[str, Any], address: str) -> str:
    return f"{node['ansible_user']}@{address}" if node.get("ansible_user") else address


def ssh_login(node: Mapping[str, Any], address: str, through: Mapping[str, Any] | None = None) -> list[str]:
    """The command that logs in to the node at this address, and does nothing there.

    through: the hostvars of another node, which connects to the address in place of this machine.
    """
    way = []
    if through:
        proxy = ["ssh", *options(through), "-W", "[%h]:%p", target(through, through["ansible_host"])]
        way = ["-o", f"ProxyCommand={shlex.join(proxy)}"]
    return ["ssh", *way, *options(node), target(node, address), "true"]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"ssh_login": ssh_login}
