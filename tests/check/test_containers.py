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
from expressions import problems

GUIDE = tree.ROOT / "container/guide"
ABSENT = {"kind": "absent", "mtime": 0}
FILE = {"kind": "file", "mtime": 100}
SOURCES = "/etc/apt/sources.list.d/aura-nvidia-container-toolkit.list"


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


SETTINGS = tree.module("roles/docker/filter_plugins/docker_settings.py")


def node(daemon: str = "", **variables: Any) -> dict[str, Any]:
    """A node with a card and with Docker."""
    seen = {
        "distribution": "Debian", "missing": [], "session": {"client": "192.168.50.9"}, "now": 500.0,
        "gpu": {"cards": [{"pci": "0000:01:00.0"}], "elsewhere": ""},
        "files": {
            "/usr/bin/dockerd": FILE, "/usr/sbin/dockerd": ABSENT, "/snap/docker/current": ABSENT,
            "/etc/docker/daemon.json": FILE if daemon else ABSENT,
        },
        "texts": {"/etc/docker/daemon.json": daemon, SOURCES: ""},
        "units": {"docker.service": {"active": True, "started": 200.0}, "aura-train@0.service": {"active": False}},
    }  # fmt: skip
    for key, value in variables.items():
        seen[key] = {**seen[key], **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
    return seen


RUNTIME = '{"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}'


@pytest.mark.parametrize(
    ("said", "daemon", "cdi"),
    [
        ("Docker version 28.2.2, build 1", "", True),
        ("Docker version 25.0.0, build 1", '{"runtimes": {"runsc": {}}}', True),
        ("Docker version 28.2.2, build 1", RUNTIME, False),  # as NVIDIA's guide has it: nothing is to be done
        ("Docker version 24.0.7, build 1", "", False),
        ("Docker version 20.10.24+dfsg1, build 297e128", "", False),
        ("Docker version 28.2.2, build 1\nold toolkit", "", False),
        ("none", "", False),
    ],
)
def test_which_docker_reads_descriptions_of_devices(said: str, daemon: str, cdi: bool) -> None:
    assert SETTINGS.docker_takes_cdi(daemon, said) is cdi
    assert daemon != RUNTIME or SETTINGS.docker_daemon(daemon, cdi) == daemon


@pytest.mark.parametrize(
    ("cdi", "daemon", "becomes"),
    [
        (True, "", {"features": {"cdi": True}}),
        (True, '{"features": {"cdi": true}, "log-driver": "local"}', None),
        (True, '{"features": {"cdi": false}}', {"features": {"cdi": True}}),
        (True, '{"log-driver": "local"}', {"log-driver": "local", "features": {"cdi": True}}),
        (False, "", json.loads(RUNTIME)),
        (False, '{"runtimes": {"nvidia": {"path": "somewhere"}}}', None),
    ],
)
def test_dockers_settings_are_those_that_this_docker_knows(cdi: bool, daemon: str, becomes: Any) -> None:
    """And what is right already is not written again, nor anybody's own settings lost."""
    text = SETTINGS.docker_daemon(daemon, cdi)
    assert text == daemon if becomes is None else json.loads(text) == becomes


TOLD = {"cards": True, "toolkit_source": "https://example.org /", "toolkit_key": "https://example.org/key"}
RUN = {"aura-train@0.service": {"active": True}}
LATE = {"/etc/docker/daemon.json": {"kind": "file", "mtime": 300}}
CDI = '{"features": {"cdi": true}}'
NO_DOCKER = {"/usr/bin/dockerd": ABSENT}
NO_TOOLKIT = node(missing=["nvidia-container-toolkit"])
BEHIND = {"client": "172.17.3.4"}  # of a router


@pytest.mark.parametrize(
    ("seen", "settings", "sentence"),
    [
        (node(), {}, ""),
        (node(gpu={"cards": []}), {"toolkit_source": ""}, ""),
        (node(gpu={"elsewhere": "WSL"}), {"toolkit_source": ""}, ""),
        (node(), {"toolkit_source": "", "cards": False}, ""),
        (NO_TOOLKIT, {"toolkit_source": ""}, "nobody has said where its container toolkit comes from"),
        (NO_TOOLKIT, {"toolkit_key": ""}, "nobody has said where its container toolkit comes from"),
        (node(), {"toolkit_source": "", "toolkit_key": ""}, ""),  # it has one already, from wherever
        (node("log-driver: local"), {}, "/etc/docker/daemon.json is no JSON object"),
        (node("[]"), {}, "/etc/docker/daemon.json is no JSON object"),
        (node(session=BEHIND, files=NO_DOCKER), {}, "no answer would reach you any more"),
        (node('{"bip": "10.199.0.1/24"}', session=BEHIND, files=NO_DOCKER), {}, ""),
        (node(session=BEHIND), {}, ""),  # it has its bridge already
        (node(units=RUN), {}, "a run is active there"),
        (node(CDI, units=RUN), {}, ""),
        (node(CDI, units=RUN, files=LATE), {}, "a run is active there"),
        (node(files={"/snap/docker/current": FILE, "/usr/bin/dockerd": ABSENT}), {}, "as a snap"),
    ],
)
def test_what_cannot_be_is_refused(seen: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    said = problems("docker", seen, **{**TOLD, **settings})
    assert sentence in said if sentence else said == ""


def test_whose_docker_is_there_stays() -> None:
    lacks: dict[str, Any] = {"missing": ["docker.io", "docker-compose", "docker-compose-v2"]}
    bare = node(files={"/usr/bin/dockerd": ABSENT}, **lacks)
    assert SETTINGS.docker_packages(bare) == ["docker.io", "docker-compose"]
    assert SETTINGS.docker_packages(bare | {"distribution": "Ubuntu"}) == ["docker.io", "docker-compose-v2"]
    for place in ("/usr/bin/dockerd", "/usr/sbin/dockerd"):
        others = {"/usr/bin/dockerd": ABSENT, place: FILE}
        assert SETTINGS.docker_packages(node(files=others, **lacks)) == []
    assert SETTINGS.docker_packages(node(missing=["docker-compose"])) == ["docker.io", "docker-compose"]


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
