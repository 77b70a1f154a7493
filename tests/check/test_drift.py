"""drift.yml's report and exit codes, on playbooks that change files here."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from plays import playbook

OUTER = """
- name: Compare
  hosts: cluster
  tags: {tags}
  gather_facts: false
  tasks:
    - name: Look
      drift: {{look: "{site}", nodes: "{{{{ ansible_play_hosts_all }}}}", json: "{report}"}}
      run_once: true
      register: found
    - name: The report
      ansible.builtin.debug: {{msg: "{{{{ found.text }}}}"}}
      run_once: true
    - name: The node is as it should be
      drift: {{verdict: "{{{{ found.nodes[inventory_hostname] }}}}"}}
"""
SITE = """
- name: Make
  hosts: cluster
  gather_facts: false
  any_errors_fatal: true
  roles: [letter, envelope]
"""
LETTER = """
- name: Nobody has locked it
  ansible.builtin.assert:
    that: not (folder ~ '/lock') is exists
    fail_msg: "{{ inventory_hostname }}: somebody has locked the letter. Take {{ folder }}/lock away."
- name: The letter is written
  ansible.builtin.copy: {dest: "{{ folder }}/letter", content: "Dear all,\\n", mode: "0644"}
"""
ENVELOPE = """
- name: It lies in its folders
  ansible.builtin.file: {path: "{{ folder }}/{{ item }}", state: directory, mode: "0755"}
  loop: [inner, outer]
"""


@dataclass
class Two:
    """Two nodes that are folders."""

    place: Path

    def drift(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """The exit code, the report and what was printed."""
        hosts, drift, roles = (self.place / name for name in ("hosts.yml", "drift.yml", "roles"))
        done = playbook("-i", hosts, drift, *words, ANSIBLE_ROLES_PATH=str(roles))
        return done.returncode, json.loads((self.place / "report.json").read_text()), done.stdout


@pytest.fixture
def two(tmp_path: Path) -> Two:
    hosts = {}
    for name in ("one", "two"):
        for folder in ("inner", "outer"):
            (tmp_path / name / folder).mkdir(parents=True)
            (tmp_path / name / folder).chmod(0o755)
        (tmp_path / name / "letter").write_text("Dear all,\n")
        (tmp_path / name / "letter").chmod(0o644)
        hosts[name] = {"folder": str(tmp_path / name), "ansible_host": "localhost"}
    here = {
        "ansible_connection": "local",
        "ansible_port": 22,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    site = tmp_path / "playbooks/site.yml"
    (play,) = yaml.safe_load((tree.ROOT / "playbooks/drift.yml").read_text())
    outer = OUTER.format(site=site, report=tmp_path / "report.json", tags=play.get("tags", []))
    for path, text in {
        "hosts.yml": json.dumps({"cluster": {"hosts": hosts, "vars": here}}),
        "roles/letter/tasks/main.yml": LETTER, "roles/envelope/tasks/main.yml": ENVELOPE,
        "playbooks/site.yml": SITE, "drift.yml": outer,
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return Two(tmp_path)


def test_what_differs_is_said_of_each_node_and_left_alone(two: Two) -> None:
    letter = two.place / "one/letter"
    letter.write_text("Dear none,\n")
    letter.chmod(0o600)
    (two.place / "two/outer").rmdir()
    (two.place / "report.json").touch(0o644)
    code, report, said = two.drift()
    assert code == 2, said
    # A diff may hold a secret.
    assert (two.place / "report.json").stat().st_mode & 0o777 == 0o600
    assert letter.read_text() == "Dear none,\n"
    one, two_ = report["nodes"]["one"], report["nodes"]["two"]
    assert (report["state"], one["state"], two_["state"]) == ("differs", "differs", "differs")
    assert [(entry["role"], entry["by"]) for entry in one["differences"]] == [("letter", "site.yml")]
    assert "-Dear none," in one["differences"][0]["diff"].splitlines()
    assert [(entry["role"], entry["item"]) for entry in two_["differences"]] == [("envelope", "outer")]
    assert "envelope: It lies in its folders (outer)" in said


def test_a_refusal_is_for_a_person_and_silence_hides_nobody(two: Two) -> None:
    (two.place / "one/lock").touch()
    hosts = json.loads((two.place / "hosts.yml").read_text())
    silent = {
        "ansible_connection": "ssh",
        "ansible_ssh_common_args": "-o ConnectTimeout=1 -o ProxyCommand=false",
    }
    hosts["cluster"]["hosts"]["two"] |= silent
    (two.place / "hosts.yml").write_text(json.dumps(hosts))
    code, report, said = two.drift()
    assert code == 4, said
    one, two_ = report["nodes"]["one"], report["nodes"]["two"]
    assert (report["state"], one["state"], two_["state"]) == ("unknown", "differs", "unknown")
    assert one["differences"][0]["by"] == "hand"
    assert "somebody has locked the letter" in one["differences"][0]["details"][0]
    assert one["not_looked_at"] == ["envelope"]
    assert two_["message"]


def test_a_check_that_cannot_begin_is_no_difference(two: Two) -> None:
    (two.place / "playbooks/site.yml").write_text("- hosts: [\n")
    code, report, _ = two.drift()
    assert code == 4
    assert {node["state"] for node in report["nodes"].values()} == {"unknown"}


def test_what_is_held_waits_and_upgrade_yml_does_not_move_it() -> None:
    drift = tree.plugin("action/drift")
    one = {"package": "containerd", "installed": "1", "candidate": "2", "security": True, "together": True}
    node = {"state": "same", "differences": [], "not_looked_at": [], "reboot_required": False}
    held, free = (node | {"waiting": [one | {"held": flag}]} for flag in (True, False))
    assert drift.node_lines(held) == ["waits: containerd 1 → 2 (security) (held)"]
    assert drift.remedies({"nodes": {"one": held}}) == []
    assert "upgrade.yml" in drift.remedies({"nodes": {"one": held, "two": free}})[0]


@pytest.mark.parametrize("words", [("--tags", "firewall"), ("--skip-tags", "firewall")])
def test_of_some_roles_only_nothing_is_said(two: Two, words: tuple[str, str]) -> None:
    """It ran nothing, and ended as if all were as it should be."""
    code, report, said = two.drift(*words)
    assert code == 4, said
    assert {node["state"] for node in report["nodes"].values()} == {"unknown"}
    assert "leave out --tags and --skip-tags" in " ".join(said.split())


def test_nothing_differs_and_the_vault_that_was_opened_for_it_is_open_inside(two: Two) -> None:
    """Also where its password was typed: nobody is asked twice."""
    assert two.drift()[0] == 0
    password, vault = two.place / "password", two.place / "group_vars/all/vault.yml"
    password.write_text("a long one\n")
    vault.parent.mkdir(parents=True)
    vault.write_text("secret: of ours\n")
    subprocess.run(["ansible-vault", "encrypt", f"--vault-password-file={password}", vault], check=True)
    code, report, said = two.drift(f"--vault-password-file={password}")
    assert (code, report["schema"], report["state"]) == (0, 1, "same"), said
    assert {name: node["state"] for name, node in report["nodes"].items()} == {"one": "same", "two": "same"}
    assert "one  as it should be" in said
