"""What one node downloads for all: the list of each node, and what is fetched when not all can be had together."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from test_driver_decision import seen as recorded

NEW = ["chrony", "nftables", "rsync", "g++", "python3.11-dev", "nfs-kernel-server", "nfs-common"]
NO_CARD = recorded("none", "server")
AMPERE = recorded("rtx3060", "server")
LOADED = recorded("rtx3060", "ubuntu_580_server", persistence=True)
DRIVER = [
    "linux-modules-nvidia-580-server-open-generic", "linux-headers-generic", "linux-image-generic",
    "nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server",
]  # fmt: skip
ASKED = "It is known which driver the cards of a node need, where they lack one"


def look(gpu: dict[str, Any], missing: list[str], distribution: str = "Ubuntu") -> dict[str, Any]:
    session = {"client": "192.168.50.9", "here": "192.168.50.20"}
    return {
        "gpu": gpu,
        "missing": missing,
        "distribution": distribution,
        "session": session,
        "files": {},
        "units": {},
    }


def lists(folder: Path, nodes: dict[str, dict[str, Any]], *words: str) -> dict[str, list[str]]:
    """packages_missing of each node and ("all") what is downloaded, as site.yml knows it after its look at these."""
    site = next(
        play for play in yaml.safe_load((tree.ROOT / "playbooks/site.yml").read_text()) if "roles" in play
    )
    task = next(task for task in site["pre_tasks"] if task["name"] == ASKED)
    role = str(tree.ROOT / "roles/packages/vars/main.yml")
    told = "{{ {'own': packages_missing, 'all': __packages_of_all} | to_json }}"
    facts = {
        "distribution": "{{ seen.distribution }}",
        "distribution_version": "22.04",
        "node_looks": {"seen": "{{ seen }}"},
    }
    tasks = [
        {"ansible.builtin.set_fact": {**facts, "cacheable": True}, "tags": "always"},
        task,
        {"ansible.builtin.include_vars": role, "tags": "packages"},
        {
            "ansible.builtin.copy": {"dest": f"{folder}/{{{{ inventory_hostname }}}}.json", "content": told},
            "tags": "packages",
        },
    ]
    (folder / "play.yml").write_text(
        yaml.safe_dump([{"hosts": "cluster", "gather_facts": False, "tasks": tasks}])
    )
    hosts = {
        name: {"lan_address": f"192.168.50.{20 + number}", "ansible_host": "localhost", **variables}
        for number, (name, variables) in enumerate(nodes.items())
    }
    common = {
        "ansible_connection": "local", "ansible_port": 22, "ansible_user": "ubuntu", "lan_prefix": 24,
        "ansible_python_interpreter": "/usr/bin/python3",
    }  # fmt: skip
    (folder / "hosts.json").write_text(json.dumps({"cluster": {"hosts": hosts, "vars": common}}))
    done = subprocess.run(
        ["ansible-playbook", "-i", str(folder / "hosts.json"), str(folder / "play.yml"), *words], cwd=tree.ROOT,
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    answers = {name: json.loads((folder / f"{name}.json").read_text()) for name in nodes}
    together = answers[next(iter(nodes))]["all"]
    return {name: answer["own"] for name, answer in answers.items()} | {"all": together}


def test_each_nodes_driver_and_compiler_are_downloaded_for_all(tmp_path: Path) -> None:
    nodes: dict[str, dict[str, Any]] = {
        "none": {"seen": look(NO_CARD, NEW)},
        "ampere": {"seen": look(AMPERE, NEW)},
        "cpu": {"seen": look(AMPERE, NEW), "torch_backend": "cpu", "nvidia_driver_enabled": False},
        "debian": {"seen": look(LOADED, NEW, "Debian"), "nvidia_driver_enabled": False},
        "later": {"seen": look(AMPERE, ["g++", "nfs-common"])},  # site.yml ran before its card came
        "done": {"seen": look(LOADED, ["python3.11-dev", "nfs-common"])},
    }
    # One role only, and all the same it is known what the cards need.
    found = lists(tmp_path, nodes, "--tags", "packages")
    few = {"chrony", "nftables", "rsync"}
    client = {*few, "nfs-common"}
    assert {name: set(packages) for name, packages in found.items()} == {
        "none": {*few, "nfs-kernel-server"},  # the first node
        "ampere": {*client, "g++", *DRIVER},
        "cpu": client,
        "debian": {*client, "g++", "python3.11-dev"},
        "later": set(DRIVER),
        "done": set(),
        # The first node has no card, and downloads what the others of its system need.
        "all": {*client, "nfs-kernel-server", "g++", *DRIVER},
    }


APT_GET = """#!/bin/sh
echo "$*" >>"$SAID"
case $* in *install\\ *open*proprietary*) exit 100;; esac
"""


@pytest.mark.parametrize(
    ("packages", "installs"),
    [
        (["chrony", "open"], ["chrony open"]),
        (["chrony", "open", "proprietary"], ["chrony open proprietary", "chrony", "open", "proprietary"]),
    ],
)
def test_what_cannot_be_had_together_is_fetched_one_by_one(
    packages: list[str], installs: list[str], tmp_path: Path
) -> None:
    programs = {"apt-get": APT_GET, "apt-cache": "#!/bin/sh\necho '  Candidate: 1.0'\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    subprocess.run(
        [tree.ROOT / "roles/packages/files/download-once", tmp_path / "out.tar.gz", *packages],
        check=True, capture_output=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(tmp_path / "said")},
    )  # fmt: skip
    said = (tmp_path / "said").read_text().splitlines()
    assert [line.partition(" install ")[2] for line in said if " install " in line] == installs
    assert (tmp_path / "out.tar.gz").stat().st_size
