"""What bootstrap says of a PC that it cannot take, in one sentence each, before it changes anything."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded

BOOTSTRAP = tree.module("roles/bootstrap/filter_plugins/bootstrap_problem.py")
JAMMY = 'NAME="Ubuntu"\r\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\r\n'
CODE, NOBODY = "non-zero return code", "ada is not in the sudoers file.  This is reported."
OURS = "aura-admin:x:650:650:Aura's controller:/var/lib/aura-admin:/bin/bash\r\n"


def problem(release: dict[str, Any], taken: str = "", root: dict[str, Any] | None = None) -> str:
    answers = {"release": release, "taken": {"stdout": taken}, "root": root or {}}
    said: str = BOOTSTRAP.bootstrap_problem(answers, "node1", "ada", "aura-admin", 650)
    return said


@pytest.mark.parametrize("taken", ["", OURS])
def test_a_pc_as_it_should_be(taken: str) -> None:
    assert problem({"stdout": JAMMY}, taken) == ""


def test_all_that_is_wrong_with_a_pc_is_said_at_once() -> None:
    strangers = "aura-admin:x:1001:1001::/home/aura-admin:/bin/bash\nsnap_daemon:x:650:650::/:/bin/false\n"
    refused = {"failed": True, "msg": "Incorrect sudo password"}
    said = problem({"stdout": 'PRETTY_NAME="Fedora Linux 44"\n'}, strangers, refused).splitlines()
    assert said[0].startswith("node1 runs Fedora Linux 44; these playbooks know Ubuntu 22.04")
    assert "is aura-admin (650), but node1 has aura-admin (1001) and snap_daemon (650) already" in said[1]
    assert said[2] == "sudo on node1 does not take the password that you typed for -K from ada."


@pytest.mark.parametrize(
    ("msg", "stdout", "sentence"),
    [
        ("Missing sudo password", "", "sudo on node1 asks ada for a password: say -K."),
        (CODE, "sudo: se requiere una contraseña\r\n", "sudo on node1 asks ada for a password: say -K."),
        (
            CODE, f"\r\n{NOBODY}\r\n",
            f"ada may not become root on node1 ({NOBODY}). There, who may: sudo usermod -aG sudo ada",
        ),
    ],
)  # fmt: skip
def test_why_sudo_refuses(msg: str, stdout: str, sentence: str) -> None:
    refused = {"failed": True, "msg": msg} | ({"stdout": stdout} if stdout else {})
    assert problem({"stdout": JAMMY}, root=refused) == sentence


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("Invalid/incorrect password: Permission denied, please try again.", "node1 does not let ada in: is that"),
        ("Task failed: Connection reset by peer", "node1 cannot be reached as ada: Connection reset by peer"),
    ],
)  # fmt: skip
def test_why_ssh_refuses(said: str, sentence: str) -> None:
    assert problem({"unreachable": True, "msg": said}, root={"skipped": True}).startswith(sentence)


def test_the_cluster_may_lie_in_a_directory_with_a_space() -> None:
    """ssh splits the value of an option at its spaces, after Ansible has split the options."""
    (proof,) = (task for task in loaded("roles/bootstrap/tasks/main.yml") if "register" in task)
    by_key = proof["vars"]["ansible_ssh_extra_args"]
    known = loaded("playbooks/group_vars/cluster/connection.yml")["cluster_ssh_args"]
    place = "/home/ada/my cluster"
    variables = {"bootstrap_state": place, "cluster_state": place, "inventory_hostname_short": "node0"}
    for options, path in ((by_key, "id_ed25519"), (known, "known_hosts")):
        values = [word.partition("=")[2] for word in shlex.split(filled_in(options, variables))]
        assert [f"{place}/{path}"] in [shlex.split(value) for value in values]
