"""What the image and the roles about containers decide, without an engine (tests/containers has one)."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import filled_in, loaded, preflight_sentences, says, variables_of

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


def test_the_image_has_the_tools_that_the_lock_file_names() -> None:
    locked = subprocess.run(
        [tree.ROOT / "container/image-tools", tree.ROOT / "requirements/controller.txt"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = set(re.findall(r"^([\w-]+)==", locked, re.MULTILINE))
    tools = "editables hatchling packaging pathspec pluggy tomlkit trove-classifiers uv"
    assert names == set(tools.split())
    assert all("--hash=sha256:" in part for part in re.split(r"^\S+==", locked, flags=re.MULTILINE)[1:])


def test_compose_gives_every_variable_of_the_guide() -> None:
    service = yaml.safe_load((tree.ROOT / "compose.yaml").read_text())["services"]["trainer"]
    guides = "MASTER_ADDR MASTER_PORT NNODES NODE_RANK GPUS_PER_NODE WORLD_SIZE RANK"
    assert set(guides.split()) <= set(service["environment"])
    assert service["network_mode"] == "host"
    assert "ports" not in service and "privileged" not in service


@pytest.mark.parametrize(
    ("docker", "sentence"),
    [(None, "Docker is not installed. Please type this"), ("#!/bin/sh\nexit 1\n", "Docker does not answer")],
)
def test_without_docker_it_is_said_what_to_type(docker: str | None, sentence: str, tmp_path: Path) -> None:
    for program in ("dirname", "bash"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    if docker:
        (tmp_path / "docker").write_text(docker)
        (tmp_path / "docker").chmod(0o755)
    done = subprocess.run(
        [tree.ROOT / "container/build", tmp_path, sys.executable, "cpu"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert sentence in done.stderr


# --- the guide's names ---------------------------------------------------------------------------------


def python(script: str, words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, GUIDE / script, *words.split()], cwd=directory, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tree.ROOT / "training"), "AURA_LANG": "en"},
    )  # fmt: skip


def corpus(directory: Path, name: str) -> None:
    (directory / "Data" / name).mkdir(parents=True)
    (directory / "Data" / name / "meta.json").write_text("{}")


def test_the_corpus_is_the_one_that_is_there(tmp_path: Path) -> None:
    done = python("train_gpt2_spanish.py", "--epochs 1", tmp_path)
    assert done.returncode == 1
    assert "There is no corpus in ./Data. Prepare one, once" in done.stderr
    corpus(tmp_path, "wikipedia")
    done = python("train_gpt2_spanish.py", "--epochs 1 --batch-size 2 --seq-len 128 --spiral", tmp_path)
    assert done.returncode == 64
    assert "--spiral" in done.stderr  # it is aura train that speaks, and --corpus was there
    corpus(tmp_path, "prose")
    done = python("train_gpt2_spanish.py", "--epochs 1", tmp_path)
    assert done.stderr == "Which corpus? Say one of: --corpus Data/prose, --corpus Data/wikipedia.\n"


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


RUNTIME = {"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}
CDI = {"features": {"cdi": True}}


@pytest.mark.parametrize(
    ("versions", "before", "after"),
    [
        ("Docker version 28.2.2, build 1", {}, CDI),
        ("Docker version 25.0.0, build 1", {"runtimes": {"runsc": {}}}, {"runtimes": {"runsc": {}}} | CDI),
        ("Docker version 28.2.2, build 1", {"features": {"cdi": False}}, CDI),
        (
            "Docker version 28.2.2, build 1",
            RUNTIME,
            RUNTIME,
        ),  # as NVIDIA's guide has it: nothing is to be done
        ("Docker version 24.0.7, build 1", {"log-driver": "local"}, {"log-driver": "local"} | RUNTIME),
        ("Docker version 20.10.24+dfsg1, build 297e128", {}, RUNTIME),
        ("Docker version 28.2.2, build 1\nold toolkit", {}, RUNTIME),
        (
            "",
            {"runtimes": {"nvidia": {"args": [], "path": "mine"}}},
            {"runtimes": {"nvidia": {"args": [], "path": "mine"}}},
        ),
    ],
)
def test_dockers_settings_are_those_that_this_docker_knows(
    versions: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """And nobody's own settings are lost."""
    assert says("docker", "__docker_wanted", **node(daemon=json.dumps(before), versions=versions)) == after


SOURCE = {"docker_toolkit_source": "https://example.org /", "docker_toolkit_key": "https://example.org/key"}
BEHIND = "172.17.3.4"  # the address of a router
THERE = ("docker", "toolkit")


@pytest.mark.parametrize(
    ("seen", "settings", "sentence"),
    [
        (node(*THERE), {}, ""),
        (node("docker"), SOURCE, ""),
        (node("docker"), {}, "nobody has said where its container toolkit comes from"),
        (
            node("docker"),
            SOURCE | {"docker_toolkit_key": ""},
            "nobody has said where its container toolkit comes from",
        ),
        (node("docker"), {"docker_cards": False}, ""),
        (node("docker", elsewhere="WSL"), {}, ""),
        (node("docker", bound="vfio-pci"), {}, ""),
        (node(*THERE, daemon="0"), {}, "/etc/docker/daemon.json is no JSON object"),
        (node(*THERE, daemon="[]"), {}, "/etc/docker/daemon.json is no JSON object"),
        (node("toolkit", client=BEHIND), {}, "no answer would reach you any more"),
        (node("toolkit", client=BEHIND, daemon='{"bip": "10.199.0.1/24"}'), {}, ""),
        (node(*THERE, client=BEHIND), {}, ""),  # it has its bridge already
        (node(*THERE, client=""), {}, ""),
        (node("toolkit", client="fe80::1%eth0"), {}, ""),
        (node(*THERE, "run"), {}, "a run is active there"),
        (node(*THERE, "run", daemon=json.dumps(CDI)), {}, ""),
        (node("toolkit", "snap"), {}, "as a snap"),
    ],
)
def test_what_cannot_be_is_refused(seen: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    said = preflight_sentences("docker", seen, **settings)
    assert sentence in said if sentence else said == ""


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
