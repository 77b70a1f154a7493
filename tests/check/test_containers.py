"""What the image and the roles about containers decide, without an engine (tests/containers has one)."""

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import filled_in, loaded, variables_of

GUIDE = tree.ROOT / "container/guide"


# --- the image ---------------------------------------------------------------------------------------


def test_nothing_that_may_hold_a_secret_is_given_to_the_build() -> None:
    lines = (tree.ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is left out, but what is named"
    let_in = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    needed = "container dist/wheelhouse requirements roles/python_env/files roles/trainer/files training"
    assert let_in == set(needed.split())
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (tree.ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert any(fnmatch.fnmatch(place, source) or source.startswith(place) for place in let_in), source


def test_compose_gives_every_variable_of_the_guide() -> None:
    service = yaml.safe_load((tree.ROOT / "compose.yaml").read_text())["services"]["trainer"]
    guides = "MASTER_ADDR MASTER_PORT NNODES NODE_RANK GPUS_PER_NODE WORLD_SIZE RANK"
    assert set(guides.split()) <= set(service["environment"])
    assert service["network_mode"] == "host"
    assert "ports" not in service and "privileged" not in service


# --- the guide's names ---------------------------------------------------------------------------------


def python(script: str, words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, GUIDE / script, *words.split()], cwd=directory, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tree.ROOT / "training"), "AURA_LANG": "en"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "prog"), [("monitor.py", "aura monitor"), ("test_ddp.py", "aura check-allreduce")]
)
def test_the_other_names_are_our_commands(script: str, prog: str, tmp_path: Path) -> None:
    assert f"usage: {prog}" in python(script, "--help", tmp_path).stdout


# --- the roles -----------------------------------------------------------------------------------------


def node(
    *there: str,
    daemon: str = "",
    client: str = "192.168.50.9",
    versions: str = "",
    bound: str = "nvidia",
    elsewhere: str = "",
) -> dict[str, Any]:
    """What tasks/read.yml has read of a node with a card, and what it is asked after the installation."""
    return {
        "ansible_facts": {"gpu": {"cards": [{"bound": bound}], "elsewhere": elsewhere}},
        "__docker_read": {"stdout_lines": ["debian", client, *there]},
        "__docker_settings_read": {"stdout": daemon},
        "__docker_versions": {"stdout": versions},
    }


@pytest.mark.parametrize(
    ("system", "there", "packages"),
    [
        ("debian", [], ["docker.io", "docker-compose"]),
        ("ubuntu", [], ["docker.io", "docker-compose-v2"]),
        ("debian", ["docker"], None),  # from docker.com, say
        ("debian", ["docker", "docker.io"], ["docker.io", "docker-compose"]),
    ],
)
def test_whose_docker_is_there_stays(system: str, there: list[str], packages: list[str] | None) -> None:
    (block,) = (task for task in loaded("roles/docker/tasks/main.yml") if "block" in task)
    (install,) = (task for task in block["block"] if "ansible.builtin.apt" in task)
    seen = {"__docker_read": {"stdout_lines": [system, "192.168.50.9", *there]}}
    known = variables_of("docker") | seen
    assert filled_in(f"{{{{ {install['when']} }}}}", known) is (packages is not None)
    if packages:
        assert [filled_in(name, known) for name in install["ansible.builtin.apt"]["name"]] == packages


@pytest.mark.parametrize(
    ("driver", "cards", "build"),
    [
        ("580.65.06", ["8.6", "12.0"], "cu130"),
        ("535.183.01", ["8.6"], "cu126"),
        ("580.65.06", ["6.1", "8.6"], "cu126"),
        ("570.86.10", ["12.0"], "cpu"),
        ("470.10", ["7.5"], "cpu"),
        ("", [], "cpu"),
    ],
)
def test_an_image_has_the_build_of_torch_that_driver_and_cards_can_use(
    driver: str, cards: list[str], build: str, tmp_path: Path
) -> None:
    program, lines = tmp_path / "nvidia-smi", "".join(f"{driver}, {card}\n" for card in cards)
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    program.chmod(0o755)
    done = subprocess.run(
        [tree.ROOT / "container/torch-build"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == build
    assert bool(done.stderr) == (build == "cpu" and bool(cards))
