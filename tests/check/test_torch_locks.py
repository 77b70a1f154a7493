"""Every build of torch is installed by hashes: those of this repository, or those recorded when it was first used."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tree
from plays import played

REQUIREMENTS = tree.ROOT / "requirements"
FILES = tree.ROOT / "roles/python_env/files"
VERSION = re.search(r"^torch==(\S+)$", (REQUIREMENTS / "torch.in").read_text(), re.MULTILINE)
PINNED = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)


def pinned(path: Path) -> dict[str, str]:
    return dict(PINNED.findall(path.read_text()))


@pytest.mark.parametrize("lock", sorted(REQUIREMENTS.glob("torch-*.txt")), ids=lambda path: path.stem)
def test_a_lock_of_torch_goes_with_the_others(lock: Path) -> None:
    assert VERSION
    names = pinned(lock)
    of_torch = names["torch"].partition("+")[0]
    assert of_torch == VERSION[1], f"{tree.relative(lock)} is of another torch: run `make lock`"
    both = sorted(set(names) & set(pinned(REQUIREMENTS / "node.txt")))
    assert not both, f"{tree.relative(lock)} and requirements/node.txt both lock {both}: run `make lock`"


def test_pip_alone_brings_all_that_the_lock_brings_and_the_trainer_imports() -> None:
    """`pip install ./training` in place of `make trainer`."""
    package = tomllib.loads((tree.ROOT / "training/pyproject.toml").read_text())["project"]
    asked = set(re.findall(r"(?m)^[\w-]+", "\n".join(package["dependencies"])))
    code = "".join(path.read_text() for path in (tree.ROOT / "training/aura").rglob("*.py"))
    imported = set(re.findall(r"(?m)^\s*(?:import|from) (\w+)", code))
    locked = re.findall(r"(?m)^[\w-]+", (REQUIREMENTS / "node.in").read_text())
    assert {name for name in locked if name.replace("-", "_") in imported} - asked == set()


def test_pypis_own_build_is_the_one_for_cuda_13_0() -> None:
    """lock-torch and the table of builds call it cu130."""
    assert pinned(REQUIREMENTS / "torch-cu130.txt")["cuda-toolkit"].startswith("13.0.")


def make_wheel(folder: Path, content: str = "") -> Path:
    """A wheel by the name that a local torch has."""
    assert VERSION
    name = f"torch-{VERSION[1]}+cpu"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-cp311-cp311-manylinux_2_28_x86_64.whl"
    about = f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION[1]}+cpu\n{content}"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: cp311-cp311-manylinux_2_28_x86_64\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {"METADATA": about, "WHEEL": tag, "RECORD": ""}.items():
            wheel.writestr(f"{name}.dist-info/{file}", text)
    return path


def run(folder: Path, program: str, *words: object) -> subprocess.CompletedProcess[str]:
    """One of the role's programs, without a network."""
    alone = {
        "UV_OFFLINE": "1", "UV_CACHE_DIR": str(folder / "uv"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(folder / "wheels"),
    }  # fmt: skip
    return subprocess.run(
        [FILES / program, *map(str, words)], env=os.environ | alone, text=True, capture_output=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_a_local_wheels_hash_is_recorded_at_first_use_and_holds_from_then_on(tmp_path: Path) -> None:
    wheel, lock = make_wheel(tmp_path / "wheels"), tmp_path / "cache/torch-cpu.txt"
    uv = Path(sys.executable).with_name("uv")
    node = tmp_path / "node.txt"
    node.touch()
    locked = run(tmp_path, "lock-torch", "cpu", lock, uv, node, REQUIREMENTS / "torch.in", wheel.parent)
    assert locked.returncode == 0, locked.stderr
    assert "a local wheel, whose hash was recorded at first use" in locked.stdout
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in lock.read_text()

    def download(wheelhouse: Path) -> subprocess.CompletedProcess[str]:
        return run(tmp_path, "download-wheelhouse", wheelhouse, sys.executable, node, lock, "cpu", "system")

    done = download(tmp_path / "good")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "good/wheels").iterdir()] == [wheel.name]
    assert (tmp_path / "good/torch.txt").read_text() == lock.read_text()

    make_wheel(tmp_path / "wheels", "Summary: another one by the same name\n")
    refused = download(tmp_path / "bad")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not list(tmp_path.glob("bad*"))


def test_wheels_that_were_brought_along_are_taken_by_the_same_hashes(tmp_path: Path) -> None:
    stick, node = tmp_path / "usb stick", tmp_path / "node.txt"
    (stick / "cpu").mkdir(parents=True)
    wheel = make_wheel(stick / "cpu/wheels")
    (tmp_path / "torch.in").write_text((REQUIREMENTS / "torch.in").read_text())
    node.write_text("# nothing else\n")
    (stick / "cpu/requirements.txt").write_text(node.read_text())
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (stick / "cpu/torch.txt").write_text(
        f"{wheel.name.replace('-', '==', 1).split('-')[0]} --hash=sha256:{checksum}\n"
    )
    include = "ansible.builtin.include_role"
    tasks = [
        {"ansible.builtin.set_fact": {"preflight_problems": []}},
        {include: {"name": "python_env", "tasks_from": "preflight"}},
        {"ansible.builtin.debug": {"msg": "{{ preflight_problems | map(attribute='sentence') | join }}"}},
        {include: {"name": "python_env", "tasks_from": "download"}, "when": "preflight_problems == []"},
    ]

    def said(cache: str) -> str:
        told = {
            "python_env_requirements": str(node), "python_env_cache": str(tmp_path / cache), "python_env_build": "cpu",
            "python_env_wheels": str(stick), "ansible_connection": "local", "ansible_become": False,
        }  # fmt: skip
        play = {"hosts": "node0", "gather_facts": False, "vars": told, "tasks": tasks}
        groups: dict[str, Any] = {"cluster": {"hosts": {"node0": {}}}}
        done = played(tmp_path, [play], groups, PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
        taken = bool([*tmp_path.glob(f"{cache}/wheelhouse-*/wheels/{wheel.name}")])
        assert taken == (cache == "good"), done.stdout
        return " ".join(done.stdout.split())

    assert "The controller has downloaded" in said("good")
    make_wheel(wheel.parent, "Summary: another one by the same name\n")
    assert "DO NOT MATCH THE HASHES" in said("forged")
    node.write_text("# another lock\n")
    missing = f"{stick} has no wheels of this version of the repository for"
    assert missing in said("old")
    shutil.rmtree(stick)
    assert missing in said("none")
