"""What stands in the way of sshd's settings: the controller would not get in."""

from __future__ import annotations

from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    user, second = settings["user"], settings["second_key"]
    if not second:
        return []
    said = []
    path = f"~{user}/.ssh/authorized_keys"
    blobs = filter_loader.get("key_blobs").j2_function
    known, new = blobs(node["texts"][path]), blobs(filter_loader.get("public_key").j2_function(second))
    if not new:
        said.append(f"sshd_second_key (ssh_second_key) is no public key: {second}.")
    if not known:
        said.append(
            f"no key is in {path}, where the controller's should be. Run playbooks/bootstrap.yml, which puts it there."
        )
    if known == new:
        said.append(
            "the second key (ssh_second_key) is the one that the controller uses already. Give another one, whose "
            "private half lies elsewhere."
        )
    return said
