"""What the image and the roles about containers decide, without an engine (tests/containers has one)."""

from __future__ import annotations

import fnmatch
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
from expressions import says

GUIDE = tree.ROOT / "container/guide"
ABSENT = {"kind": "absent", "mtime": 0}
FILE = {"kind": "file", "mtime": 100}


# --- the image ---------------------------------------------------------------------------------------


def test_nothing_that_may_hold_a_secret_is_given_to_the_build() -> None:
    lines = (tree.ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is left out, but what is named"
    let_in = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert let_in == {
        "container",
        "dist/wheelhouse",
        "requirements",
        "roles/python_env/files",
        "roles/trainer/files",
        "training",
    }
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (tree.ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert any(fnmatch.fnmatch(place, source) or source.startswith(place) for place in let_in), source


def test_the_image_is_built_by_the_scripts_that_make_a_release() -> None:
    script = (tree.ROOT / "container/make-release").read_text()
    for name in ("roles/trainer/files/install-release", "roles/trainer/files/build-wheel"):
        assert (tree.ROOT / name).exists()
        assert f"./{Path(name).name} " in script
    locked = subprocess.run(
        [tree.ROOT / "container/image-tools", tree.ROOT / "requirements/controller.txt"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = set(re.findall(r"^([\w-]+)==", locked, re.MULTILINE))
    assert names == {
        "editables",
        "hatchling",
        "packaging",
        "pathspec",
        "pluggy",
        "tomlkit",
        "trove-classifiers",
        "uv",
    }
    assert all("--hash=sha256:" in part for part in re.split(r"^\S+==", locked, flags=re.MULTILINE)[1:])


def test_compose_gives_every_variable_of_the_guide() -> None:
    service = yaml.safe_load((tree.ROOT / "compose.yaml").read_text())["services"]["trainer"]
    assert {
        "MASTER_ADDR",
        "MASTER_PORT",
        "NNODES",
        "NODE_RANK",
        "GPUS_PER_NODE",
        "WORLD_SIZE",
        "RANK",
    } <= set(service["environment"])
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


def toolkit(version: str = "28.2.2", daemon: str = "", **variables: Any) -> dict[str, Any]:
    seen = {
        "gpu": {"cards": [{"pci": "0000:01:00.0"}], "elsewhere": ""},
        "missing": [],
        "files": {
            "/usr/bin/dockerd": FILE,
            "/usr/sbin/dockerd": ABSENT,
            "/etc/docker/daemon.json": FILE if daemon else ABSENT,
            "/var/run/cdi/nvidia.yaml": FILE,
            "/etc/apt/keyrings/aura-nvidia-container-toolkit.asc": FILE,
        },
        "texts": {"/etc/docker/daemon.json": daemon},
        "units": {
            "docker.service": {"active": True, "started": 200.0},
            "nvidia-cdi-refresh.path": {"active": True, "enabled": True},
            "aura-train@0.service": {"active": False},
        },
        "now": 500.0,
    }
    for key, value in variables.items():
        seen[key] = {**seen[key], **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
    return {
        "nvidia_container_toolkit_enabled": True,
        "nvidia_container_toolkit_source": "https://example.org/deb /",
        "nvidia_container_toolkit_key": "https://example.org/key",
        "ansible_check_mode": False,
        "__nvidia_container_toolkit_seen": seen,
        "__nvidia_container_toolkit_version": {"stdout": f"Docker version {version}, build 1"},
    }


@pytest.mark.parametrize(
    ("version", "daemon", "differs"),
    [
        ("28.2.2", "", True),
        ("28.2.2", '{"features": {"cdi": true}, "log-driver": "local"}', False),
        ("25.0.0", '{"features": {"cdi": false}}', True),
        ("20.10.24+dfsg1", "", True),
        ("20.10.24+dfsg1", '{"features": {"cdi": true}}', True),
        ("20.10.24+dfsg1", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}', False),
        ("24.0.7", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}', False),
    ],
)
def test_dockers_settings_are_those_that_this_docker_knows(version: str, daemon: str, differs: bool) -> None:
    seen = toolkit(version, daemon)
    assert says("nvidia_container_toolkit", "__nvidia_container_toolkit_daemon_differs", **seen) is differs


def test_settings_that_docker_has_not_read_are_seen() -> None:
    said = "__nvidia_container_toolkit_unread"
    daemon = '{"features": {"cdi": true}}'
    assert says("nvidia_container_toolkit", said, **toolkit(daemon=daemon)) is False
    late = {"/etc/docker/daemon.json": {"kind": "file", "mtime": 300}}
    assert says("nvidia_container_toolkit", said, **toolkit(daemon=daemon, files=late)) is True


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (toolkit(), ""),
        (toolkit(gpu={"cards": []}, files={"/usr/bin/dockerd": ABSENT}), ""),
        (toolkit(gpu={"elsewhere": "WSL"}, files={"/usr/bin/dockerd": ABSENT}), ""),
        (
            {**toolkit(), "nvidia_container_toolkit_source": ""},
            "nobody has said where its container toolkit comes from",
        ),
        (
            {**toolkit(), "nvidia_container_toolkit_key": ""},
            "nobody has said where its container toolkit comes from",
        ),
        (toolkit(files={"/usr/bin/dockerd": ABSENT}), "there is no Docker that its cards could be given to"),
        (toolkit(daemon="log-driver: local"), "/etc/docker/daemon.json is no JSON object"),
        (toolkit(units={"aura-train@0.service": {"active": True}}), "a run is active there"),
        (toolkit(daemon='{"features": {"cdi": true}}', units={"aura-train@0.service": {"active": True}}), ""),
    ],
)
def test_what_cannot_be_is_refused(seen: dict[str, Any], sentence: str) -> None:
    said = says("nvidia_container_toolkit", "__nvidia_container_toolkit_problem", **seen)
    assert sentence in said if sentence else said == ""


def docker(**files: dict[str, Any]) -> dict[str, Any]:
    seen = {
        "distribution": "Debian",
        "missing": ["docker.io", "docker-compose", "docker-compose-v2"],
        "files": {
            "/usr/bin/dockerd": ABSENT,
            "/usr/sbin/dockerd": ABSENT,
            "/snap/docker/current": ABSENT,
            **files,
        },
        "units": {
            "aura-firewall.service": {"active": True},
            "docker.service": {"active": False, "enabled": False},
        },
    }
    return {"__docker_seen": seen, "ansible_check_mode": False}


def test_whose_docker_is_there_stays() -> None:
    assert set(says("docker", "__docker_missing", **docker())) == {"docker.io", "docker-compose"}
    ubuntu = docker()
    ubuntu["__docker_seen"]["distribution"] = "Ubuntu"
    assert set(says("docker", "__docker_missing", **ubuntu)) == {"docker.io", "docker-compose-v2"}
    for place in ("/usr/bin/dockerd", "/usr/sbin/dockerd"):
        assert says("docker", "__docker_missing", **docker(**{place: FILE})) == []
    assert "as a snap" in says("docker", "__docker_problem", **docker(**{"/snap/docker/current": FILE}))


def test_without_the_firewall_there_is_no_docker() -> None:
    seen = docker()
    assert says("docker", "__docker_problem", **seen) == ""
    seen["__docker_seen"]["units"]["aura-firewall.service"]["active"] = False
    assert "nothing guards the ports" in says("docker", "__docker_problem", **seen)
