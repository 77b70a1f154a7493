"""The passphrase of the cluster's own key: Ansible asks nobody for it, an ssh-agent says it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def shown(key: Path) -> str:
    return os.path.relpath(key, os.environ.get("PWD") or ".")


def has_passphrase(key: Path) -> bool:
    opened = ["ssh-keygen", "-y", "-P", "", "-f", str(key)]
    said = subprocess.run(opened, capture_output=True, text=True, check=False).stderr
    return "incorrect passphrase" in said  # of a file with a wrong mode ssh says so itself


def cluster_key_problems(state: str) -> list[str]:
    """state: the directory with the key."""
    key = Path(state, "id_ed25519")
    if not key.is_file() or not has_passphrase(key):
        return []
    known = subprocess.run(["ssh-add", "-L"], capture_output=True, text=True, check=False).stdout
    if key.with_suffix(".pub").read_text().split()[1] in known.split():
        return []
    return [
        f"The cluster's key has a passphrase, and no ssh-agent here says it. Type: ssh-add {shown(key)} "
        "(where there is no agent, first: eval $(ssh-agent))"
    ]


def passphrase_offer(state: str, nodes_here: Sequence[str]) -> str:
    """What is said to a person whose controller is a node, too; ''."""
    key = Path(state, "id_ed25519")
    if not nodes_here or has_passphrase(key):
        return ""
    path = shown(key)
    return (
        f"{nodes_here[0]} is this machine, and {path} opens every node as root. So that it does not for whoever comes "
        f"into your account, give it a passphrase: ssh-keygen -p -f {path}, and ssh-add {path} once in each session."
    )


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"cluster_key_problems": cluster_key_problems, "passphrase_offer": passphrase_offer}
