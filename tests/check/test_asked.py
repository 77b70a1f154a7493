"""What bootstrap.yml asks at a terminal, and what it does where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tree
from terminal import at_a_terminal

PUBLIC = {"node0": "AAAA", "node1": "AAAB"}


def run(words: list[str], typed: list[str], **environment: str) -> tuple[int, str]:
    return at_a_terminal(["ansible-playbook", *words], typed, **environment)


def know(folder: Path, typed: list[str], host_keys: object = "ask", *more: str) -> tuple[int, str]:
    """The tasks of bootstrap.yml that come before a password is sent."""
    keyscan = folder / "ssh-keyscan"
    keyscan.write_text('#!/bin/sh\n[ "$6" = ed25519 ] && cat "$0.$7"\n')
    keyscan.chmod(0o755)
    for name, public in PUBLIC.items():
        (folder / f"ssh-keyscan.{name}").write_text(f"# {name}:22 SSH-2.0-x\n{name} ssh-ed25519 {public}\n")
    here = {"ansible_host": "{{ inventory_hostname }}", "ansible_port": 22, "ansible_connection": "local"}
    (folder / "hosts.json").write_text(
        json.dumps({"cluster": {"hosts": dict.fromkeys(PUBLIC), "vars": here}})
    )
    tasks = [{"ansible.builtin.import_tasks": str(tree.ROOT / "playbooks/tasks/know_host_keys.yml")}]
    play = {"hosts": "cluster", "gather_facts": False, "tasks": tasks}
    (folder / "play.yml").write_text(json.dumps([play]))
    told = ("-e", f"host_keys={host_keys}", "-e", f"cluster_state={folder}/state")
    words = ["-i", str(folder / "hosts.json"), str(folder / "play.yml"), *told, *more]
    return run(words, typed, PATH=f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (["n"], "Whatever answers there does not get the password."),
        ([""], "Whatever answers there does not get the password."),
        ([], "Nobody is at a terminal to compare the host keys: -e host_keys=FILE"),
    ],
)
def test_nothing_is_recorded_without_a_word(tmp_path: Path, typed: list[str], sentence: str) -> None:
    code, said = know(tmp_path, typed)
    assert code == 2
    assert sentence in said
    assert "No password has been sent" in said
    assert not (tmp_path / "state/known_hosts").exists()


@pytest.mark.parametrize("host_keys", ["ask", "accept"])
def test_a_check_shows_the_keys_and_asks_and_records_nothing(tmp_path: Path, host_keys: str) -> None:
    code, said = know(tmp_path, [], host_keys, "--check")
    assert code == 0, said
    assert "node1 node1 ed25519 SHA256:" in said and "yes, or" not in said
    assert not (tmp_path / "state").exists()


def test_a_check_of_bootstrap_logs_in_nowhere_by_password(tmp_path: Path) -> None:
    """A stand-in for ssh: it answers, and writes down how it was called."""
    tools = {
        "ssh-keyscan": f'echo "# x:22 SSH-2.0-x\nx ssh-ed25519 {PUBLIC["node0"]}"',
        "ssh": f'echo "$*" >>{tmp_path}/asked; echo "Permission denied (publickey,password)." >&2; exit 255',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "group_vars").symlink_to(tree.ROOT / "inventory/lan/group_vars")
    hosts = {"node0": {"lan_address": "192.168.50.20", "host_keys": "accept"}}
    (tmp_path / "hosts.json").write_text(json.dumps({"cluster": {"hosts": hosts}}))
    (tmp_path / "password").write_text("secret")
    passwords = [f"--{kind}-password-file={tmp_path}/password" for kind in ("connection", "become")]
    words = ["-i", str(tmp_path / "hosts.json"), "playbooks/bootstrap.yml", "--check", *passwords]
    code, said = run(words, [], PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 0 and "Nothing was looked at on node0" in said, said
    calls = (tmp_path / "asked").read_text().splitlines()
    assert calls and all("BatchMode=yes" in call and "accept-new" not in call for call in calls), calls
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("typed", [["y"], []], ids=["a person", "a file"])
def test_what_somebody_vouches_for_is_recorded(tmp_path: Path, typed: list[str]) -> None:
    file = tmp_path / "FILE"
    file.write_text("".join(f"ssh-ed25519 {public} root@pc\n" for public in PUBLIC.values()))
    code, said = know(tmp_path, typed, "ask" if typed else file)
    assert code == 0, said
    assert "node1 node1 ed25519 SHA256:" in said
    recorded = tmp_path / "state/known_hosts"
    assert recorded.read_text() == "node0 ssh-ed25519 AAAA\nnode1 ssh-ed25519 AAAB\n"
    assert recorded.stat().st_mode & 0o777 == 0o600
