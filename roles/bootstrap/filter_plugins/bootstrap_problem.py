"""What stands in the way of a node's first contact: the person's account, the system, sudo, the name of our account."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KNOWN = re.compile(r"Ubuntu 22\.04|Ubuntu 24\.04|Debian GNU/Linux 12")
Answer = Mapping[str, Any]  # what a task has registered


def unknown_system(release: str, name: str) -> str:
    """A sentence where /etc/os-release is that of a system that these playbooks do not know; else nothing."""
    found = re.search(r"^PRETTY_NAME=\"?([^\"\r\n]+)", release, re.MULTILINE)
    system = found[1] if found else "a system without a name"
    if KNOWN.match(system):
        return ""
    return f"{name} runs {system}; these playbooks know Ubuntu 22.04, Ubuntu 24.04 and Debian 12."


def not_let_in(said: str, name: str, user: str) -> str:
    if "ermission denied" not in said:
        return f"{name} cannot be reached as {user}: {said.removeprefix('Task failed: ')}"
    return (
        f"{name} does not let {user} in: is that the user that you made there (first_user), and the password that you "
        f"typed for -k theirs? Where the PCs have several, one after the other: --limit {name}"
    )


def not_root(answer: Answer, name: str, user: str) -> str:
    said = str(answer.get("msg", ""))
    if "Incorrect" in said:
        return f"sudo on {name} does not take the password that you typed for -K from {user}."
    wrote = f"{answer.get('stdout', '')}\n{answer.get('stderr', '')}".split("\n")
    reason = next((line.strip() for line in wrote if "sudo" in line), said)
    if "Missing" in said or "se requiere una contrase" in reason:  # Ansible knows sudo's English only
        return f"sudo on {name} asks {user} for a password: say -K."
    return f"{user} may not become root on {name} ({reason}). There, who may: sudo usermod -aG sudo {user}"


def somebody_else(passwd: str, name: str, admin: str, number: int) -> str:
    """passwd: the lines of those who have the name or the number."""
    users = [line.strip().split(":") for line in passwd.splitlines() if line.count(":") > 2]
    others = [f"{user[0]} ({user[2]})" for user in users if (user[0], user[2]) != (admin, str(number))]
    if not others:
        return ""
    return (
        f"The controller's account is {admin} ({number}), but {name} has {' and '.join(others)} already. Give that one "
        "another name or number, or take another number for ours: bootstrap_uid in settings.yml."
    )


def bootstrap_problem(answers: Mapping[str, Answer], name: str, user: str, admin: str, number: int) -> str:
    """What a person has to do before this node can take part; nothing where all is well.

    answers: `release` (os-release), `taken` (getent), `root` (sudo), `sshd` (what keeps the key out), as they were
    registered. user: as whom we come.
    """
    release, root, sshd = answers["release"], answers["root"], answers.get("sshd", {})
    if release.get("unreachable"):
        return not_let_in(str(release["msg"]), name, user)
    said = [
        unknown_system(release["stdout"], name),
        somebody_else(answers["taken"]["stdout"], name, admin, number),
        not_root(root, name, user) if root.get("failed") else "",
        *(f"{name}: {sentence}" for sentence in re.findall(r"(?m)^problem: (.*\S)", sshd.get("stdout", ""))),
    ]
    return "\n".join(filter(None, said))


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"bootstrap_problem": bootstrap_problem, "unknown_system": unknown_system}
