"""What a person sees of a playbook, on a terminal and without one."""

from __future__ import annotations

import os
import pty
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import tree
from plays import playbook

PLAY = """
- name: Restart who waits for it
  hosts: nobody
- name: Make every node a member
  hosts: all
  gather_facts: false
  tasks:
    - name: Nothing happens
      ansible.builtin.command: "true"
      changed_when: false
    - name: Of whom nobody answers, the playbook says what it makes of that
      ansible.builtin.raw: "true"
      vars: {ansible_connection: ssh, ansible_host: missing.invalid}
      ignore_unreachable: true
      changed_when: false
    - name: Two get a file
      ansible.builtin.command: "true"
      when: inventory_hostname != 'node1'
    - name: All get one
      ansible.builtin.command: "true"
    - ansible.builtin.debug: {msg: "{{ inventory_hostname }}: 0.001 s from the clock"}
    - ansible.builtin.debug: {msg: [one for all, "in \\etwo\\x9b lines"]}
      run_once: true
    - name: Of a loop one fails
      ansible.builtin.command: ls {{ item }}
      loop: [/, /nowhere]
      changed_when: false
      when: inventory_hostname == 'node2'
    - name: Two have no room
      ansible.builtin.fail: {msg: "the disk is full. Make room."}
      when: inventory_hostname != 'node2'
    - ansible.builtin.set_stats: {aggregate: false, data: {next: "Type: site.yml"}}
"""


OURS = {"ANSIBLE_STDOUT_CALLBACK": "aura", "ANSIBLE_NOCOLOR": "1", "TERM": "xterm"}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    play = tmp_path / "play.yml"
    play.write_text(PLAY)
    settings = ["-e", "ansible_port=22", "-e", "ansible_python_interpreter=/usr/bin/python3"]
    return ["-i", "node0,node1,node2,", "-c", "local", *settings, str(play)]


def test_what_matters_is_a_line_and_a_failure_is_its_sentence_once(words: list[str]) -> None:
    done = subprocess.run(
        ["ansible-playbook", *words], cwd=tree.ROOT, env=os.environ | OURS, text=True, capture_output=True, check=False
    )  # fmt: skip
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "Make every node a member",
        "  node0, node2: Two get a file",
        "  all 3 nodes: All get one",
    ], done.stdout + done.stderr
    # Who says itself which node it is about is not named twice; in whatever order the nodes answer.
    assert sorted(lines[3:6]) == [f"  node{number}: 0.001 s from the clock" for number in range(3)]
    # What a node says moves no cursor.
    assert lines[6:8] == ["  one for all", "  in \N{REPLACEMENT CHARACTER}two\N{REPLACEMENT CHARACTER} lines"]
    assert lines[8].startswith("✗ node2: ls: cannot access '/nowhere'")
    assert lines[9] == "✗ node0, node1: the disk is full. Make room."
    assert [line.rpartition(",")[0] for line in lines[10:]] == [
        "node0, node2: failed, 2 changed",
        "node1: failed, 1 changed",
    ]
    assert "\033" not in done.stdout


def test_with_v_it_is_ansibles_own(words: list[str]) -> None:
    said = playbook(*words, "-v", **OURS).stdout
    assert "TASK [All get one]" in said and "PLAY RECAP" in said


def test_on_a_terminal_one_line_moves_and_none_of_it_stays(words: list[str]) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["ansible-playbook", *words], cwd=tree.ROOT, env=os.environ | OURS,
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with suppress(OSError):  # the other end has closed it
        while part := os.read(ours, 65536):
            said += part
    process.wait(timeout=60)
    text = said.decode().replace("\r\n", "\n")
    assert "3/3  Nothing happens" in text
    # What a terminal shows at the end: of each line what was written after it was erased last.
    shown = [line.rpartition("\033[K")[2] for line in text.split("\n")]
    assert "  all 3 nodes: All get one" in shown
    assert not [line for line in shown if "Nothing happens" in line]


@pytest.mark.parametrize(
    ("given", "named"),
    [([], ""), (["-i", "inventory/lab"], "-i inventory/lab "), (["-i", "a,", "-i", "b,"], "-i a, -i b, ")],
)
def test_what_is_to_be_typed_is_about_the_inventory_that_was_given(
    tmp_path: Path, given: list[str], named: str
) -> None:
    play = tmp_path / "play.yml"
    play.write_text("""
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: "See: ansible-playbook playbooks/status.yml (ansible-playbook -i other site.yml)"}
    - ansible.builtin.set_stats: {aggregate: false, data: {next: "Next: ansible-playbook site.yml"}}
""")
    said = playbook(*given, "-c", "local", play, **OURS, PWD=str(tree.ROOT)).stdout
    assert f"See: ansible-playbook {named}playbooks/status.yml (ansible-playbook -i other" in said
    assert said.splitlines()[-1] == f"Next: ansible-playbook {named}site.yml"


def test_a_long_wait_shows_what_this_machine_has_received_and_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = tree.plugin("callback/aura")
    monkeypatch.setattr(callback, "NET", tmp_path)
    for card, device in (("enp3s0", True), ("br0", False)):
        (tmp_path / card / "statistics").mkdir(parents=True)
        (tmp_path / card / "statistics/rx_bytes").write_text("1250000000\n")
        (tmp_path / card / "statistics/tx_bytes").write_text("1000000\n")
        if device:
            (tmp_path / card / "device").mkdir()
    assert callback.moved() == (1250000000, 1000000)
    assert callback.so_far((0, 0), callback.moved()) == "  ↓ 1,250 MB"
    assert callback.so_far(callback.moved(), callback.moved()) == ""
