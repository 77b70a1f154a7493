"""The first contact: whose host keys are taken, who is asked, what stands in the way; a check sends nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded, preflight_sentences
from plays import played, plays_of
from terminal import at_a_terminal

NODES = ("node0", "node1")


def run(folder: Path, words: list[str], typed: list[str]) -> tuple[int, str]:
    words = ["ansible-playbook", "-i", str(folder / "hosts.json"), *words]
    return at_a_terminal(words, typed, PATH=f"{folder}:{os.environ['PATH']}")


def stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def lan(tmp_path: Path) -> Path:
    """Two nodes that nobody has seen, and stand-ins for what asks them; their host keys are in NAME.pub."""
    for name in NODES:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{name}", "-f", tmp_path / name]
        )
    stand_in(
        tmp_path / "ssh-keyscan",
        f'for name; do :; done\necho "# $name:22 SSH-2.0-x"\necho "$name $(cat {tmp_path}/$name.pub)"',
    )
    here = {"ansible_host": "{{ inventory_hostname }}", "ansible_port": 22, "ansible_connection": "local"}
    here["ansible_python_interpreter"] = "{{ ansible_playbook_python }}"
    groups = {"cluster": {"hosts": dict.fromkeys(NODES), "vars": here}}
    (tmp_path / "hosts.json").write_text(json.dumps(groups))
    tasks = [{"ansible.builtin.import_tasks": str(tree.ROOT / "playbooks/tasks/know_host_keys.yml")}]
    (tmp_path / "play.yml").write_text(
        json.dumps([{"hosts": "cluster", "gather_facts": False, "tasks": tasks, "any_errors_fatal": True}])
    )
    (tmp_path / "state").mkdir()
    (tmp_path / "empty.pub").touch()
    return tmp_path


def know(lan: Path, typed: list[str], host_keys: object, *more: str) -> tuple[int, str, str]:
    """The tasks that come before a password is sent: how they end, what they say, and what is recorded then."""
    told = [
        "-e",
        f"cluster_state={lan}/state",
        *(["-e", f"host_keys={host_keys}"] if host_keys else []),
        *more,
    ]
    code, said = run(lan, [str(lan / "play.yml"), *told], typed)
    recorded = lan / "state/known_hosts"
    return code, said, recorded.read_text() if recorded.exists() else ""


def public(lan: Path, name: str) -> str:
    return " ".join((lan / f"{name}.pub").read_text().split()[:2])


@pytest.mark.parametrize(
    ("typed", "host_keys", "sentence"),
    [
        (["n"], "", "Whatever answers there does not get the password."),
        ([], "ask", "Where nobody is at a terminal: -e host_keys=FILE"),
        ([], "nowhere", "host_keys=nowhere is neither ask nor accept nor a file"),
        ([], "node0.pub", "is a PC's own says, at its own keyboard: ssh-keygen -lf"),
        ([], "empty.pub", "node0 (node0) shows SHA256:"),
    ],
)
def test_nothing_is_recorded_without_a_word(
    lan: Path, typed: list[str], host_keys: str, sentence: str
) -> None:
    code, said, recorded = know(lan, typed, lan / host_keys if ".pub" in host_keys else host_keys)
    assert code == 2 and sentence in said and "No password has been sent" in said, said
    assert recorded == ""


@pytest.mark.parametrize("host_keys", ["ask", "accept"])
def test_a_check_shows_the_keys_and_asks_and_records_nothing(lan: Path, host_keys: str) -> None:
    code, said, recorded = know(lan, [], host_keys, "--check")
    assert code == 0 and "node1 node1 256 SHA256:" in said and "(yes/no)" not in said, said
    assert recorded == ""


@pytest.mark.parametrize("vouched", ["a person", "keys", "fingerprints"])
def test_what_somebody_vouches_for_is_recorded(lan: Path, vouched: str) -> None:
    for name in NODES if vouched != "a person" else ():
        text = (lan / f"{name}.pub").read_text()
        if vouched == "fingerprints":
            text = subprocess.check_output(["ssh-keygen", "-lf", lan / f"{name}.pub"], text=True)
        (lan / "FILE").open("a").write(text)
    code, said, recorded = know(lan, *(([], lan / "FILE") if (lan / "FILE").exists() else (["yes"], "ask")))
    assert code == 0 and "node1 node1 256 SHA256:" in said, said
    assert recorded.splitlines() == [f"{name} {public(lan, name)}" for name in NODES]


@pytest.mark.parametrize(
    ("owner", "sentence"),
    [
        ("node0", "shows the same host key as node0: one disk was copied from the other"),
        (
            "node9",
            "shows the host key of node9, which is no node any more. If you have renamed it: ssh-keygen -R",
        ),
    ],
)
def test_one_key_for_two_is_refused(lan: Path, owner: str, sentence: str) -> None:
    (lan / "state/known_hosts").write_text(f"{owner} {public(lan, 'node1')}\n")
    code, said, recorded = know(lan, [], "accept")
    assert code == 2 and f"node1 (node1) {sentence}" in said, said
    assert recorded.count("\n") == 1


def test_a_check_of_bootstrap_logs_in_nowhere_by_password(lan: Path) -> None:
    """The stand-in for ssh answers, and writes down how it was called."""
    refused = 'echo "Permission denied (publickey,password)." >&2; exit 255'
    stand_in(lan / "ssh", f'echo "$*" >>{lan}/asked; {refused}')
    stand_in(lan / "ssh-keyscan", f'echo "x $(cat {lan}/node0.pub)"')
    (lan / "group_vars").symlink_to(tree.ROOT / "inventory/lan/group_vars")
    hosts = {"node0": {"lan_address": "192.168.50.20", "host_keys": "accept"}}
    (lan / "hosts.json").write_text(json.dumps({"cluster": {"hosts": hosts}}))
    (lan / "password").write_text("secret")
    passwords = [f"--{kind}-password-file={lan}/password" for kind in ("connection", "become")]
    code, said = run(lan, ["playbooks/bootstrap.yml", "--check", *passwords], [])
    assert code == 0 and "Nothing was looked at on node0" in said, said
    calls = (lan / "asked").read_text().splitlines()
    assert calls and all("BatchMode=yes" in call and "accept-new" not in call for call in calls), calls
    assert list((lan / "state").iterdir()) == []


NOISE = "Welcome!\r\nbash: warning: setlocale: LC_ALL: cannot change locale (es_ES.UTF-8)\r\n"
JAMMY = {"stdout": f'{NOISE}NAME="Ubuntu"\r\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\r\n'}
OURS = "taken:aura-admin:x:650:650:Aura's controller:/var/lib/aura-admin:/bin/sh\r\n"
TAKEN = "taken:aura-admin:x:1001:1001::/home/aura-admin:/bin/bash\r\ntaken:snap_daemon:x:650:650::/:/bin/false\r\n"
CODE, NOBODY = "non-zero return code", "ada is not in the sudoers file.  This is reported."


def failed(msg: str, stdout: str = "") -> dict[str, Any]:
    return {"failed": True, "msg": msg, "stdout": stdout}


@pytest.mark.parametrize(
    ("release", "root", "sentences"),
    [
        (JAMMY, {"stdout": NOISE}, []),
        ({"stdout": JAMMY["stdout"] + OURS}, {}, []),
        ({"stdout": 'PRETTY_NAME="Fedora Linux 44"\n'}, {"skipped": True}, ["it runs Fedora Linux 44; these"]),
        ({"stdout": JAMMY["stdout"] + TAKEN}, failed("Incorrect sudo password"),
         ["is aura-admin 650, but there is aura-admin 1001 and snap_daemon 650 already",
          "sudo does not take the password that you typed for -K from ada."]),
        (JAMMY, failed("Missing sudo password"), ["sudo asks ada for a password: say -K."]),
        (JAMMY, failed(CODE, "sudo: se requiere una contraseña\r\n"), ["sudo asks ada for a password: say -K."]),
        (JAMMY, failed(CODE, f"{NOISE}{NOBODY}\r\n"), [f"ada may not become root ({NOBODY}). There, who"]),
        (JAMMY, {"stdout": f"{NOISE}requiretty:/etc/sudoers.d/x:Defaults requiretty\r\n"},
         ["sudo wants a terminal, and Ansible has none. Remove requiretty there: /etc/sudoers.d/x:Defaults"]),
        ({"unreachable": True, "msg": "Invalid/incorrect password: Permission denied"}, {"skipped": True},
         ["ada is not let in: is that the user that you made there (first_user)"]),
        ({"unreachable": True, "msg": "Task failed: Connection reset by peer"}, {"skipped": True},
         ["ada cannot log in: Connection reset by peer"]),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_is_said_at_once(
    release: dict[str, Any], root: dict[str, Any], sentences: list[str]
) -> None:
    answers = {
        "__bootstrap_release": release,
        "__bootstrap_root": root,
        "__bootstrap_sshd": {"skipped": True},
    }
    said = preflight_sentences("bootstrap", answers, ansible_user="ada", bootstrap_user="aura-admin")
    assert all(sentence in said for sentence in sentences), said
    assert sentences or said == ""


@pytest.mark.parametrize(
    ("came_from", "passphrase"), [("10.0.0.9", ""), ("10.0.0.1", ""), ("10.0.0.1", "secret")]
)
def test_where_the_controller_is_a_node_a_passphrase_is_offered(
    tmp_path: Path, came_from: str, passphrase: str
) -> None:
    """All that stands in the way is one table, before that. The nodes are this machine."""
    key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(tmp_path / "id_ed25519")]
    subprocess.run(key, check=True)
    (play,) = plays_of("bootstrap")
    (judge,) = (task for task in play["pre_tasks"] if "stands in the way on any" in task["name"])
    here: dict[str, Any] = {"ansible_connection": "local", "preflight_problems": []}
    groups = {"cluster": {"hosts": dict.fromkeys(NODES, here), "vars": {"cluster_state": str(tmp_path)}}}
    plays = [{"hosts": "cluster", "tasks": [judge, *play["post_tasks"]]}]
    ssh = {"SSH_CONNECTION": f"{came_from} 50000 10.0.0.1 22"}
    done = played(tmp_path, plays, groups, **ssh)
    assert done.returncode == 0 and "Next: ansible-playbook site.yml" in done.stdout, done.stdout
    offered = (
        "node0 is this machine" in done.stdout and "give it a passphrase: ssh-keygen -p -f" in done.stdout
    )
    assert offered == (came_from == "10.0.0.1" and not passphrase), done.stdout
    here["preflight_problems"] = [{"role": "bootstrap", "sentence": "sudo asks ada for a password: say -K."}]
    said = played(tmp_path, plays, groups, **ssh).stdout
    assert (
        "node0, node1  bootstrap  sudo asks ada" in said and "Nothing has been changed on any node." in said
    ), said


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
