"""A bundle is opened whole or not at all, and says in a sentence what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tree

PROGRAM = tree.ROOT / "roles/bundle/files/bundle"


def bundle(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *words], input=stdin, text=True, capture_output=True, check=False
    )


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A small bundle with all kinds of members."""
    house = tmp_path / "wheelhouse-abc"
    (house / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(house / "wheels/one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one.py", "x" * 5000)
    (house / "python/bin").mkdir(parents=True)
    program = house / "python/bin/python3.11"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (house / "python/bin/python3").symlink_to("python3.11")
    (tmp_path / "packages.tar").write_bytes(bytes(range(256)) * 4000)
    asked: dict[str, Any] = {
        "facts": {
            "system": {"distribution": "Debian", "version": "12", "machine": "x86_64"},
            "build": "cpu",
        },
        "contents": {"packages.tar": str(tmp_path / "packages.tar"), "wheelhouse-abc": str(house)},
    }
    done = bundle("pack", str(tmp_path / "bundle.tar"), stdin=json.dumps(asked))
    assert done.returncode == 0, done.stderr
    return tmp_path / "bundle.tar"


def refused(file: Path, cache: Path) -> str:
    done = bundle("open", str(file), str(cache))
    assert done.returncode == 1
    assert list(cache.glob("*")) == [], "something was left behind"
    return done.stderr


def test_it_is_taken_apart_where_the_roles_look(packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = bundle("open", str(packed), str(cache))
    said = json.loads(done.stdout)
    assert said["wheelhouses"]["wheelhouse-abc"]["installed"] == 5000
    assert (Path(said["directory"]) / "packages.tar").stat().st_size == said["packages_bytes"] == 256 * 4000
    house = cache / "wheelhouse-abc"
    assert (house / "python/bin/python3").readlink() == Path("python3.11")
    assert (house / "python/bin/python3.11").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in cache.iterdir()) == [Path(said["directory"]).name, "wheelhouse-abc"]
    # Again: nothing is read any more, so that it does not matter what has become of the file's end.
    with packed.open("r+b") as file:
        file.truncate(20480)
    assert json.loads(bundle("open", str(packed), str(cache)).stdout) == said


def test_a_truncated_one_is_refused(packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    size = packed.stat().st_size
    for length in (size // 2, size - 15000):
        with packed.open("r+b") as file:
            file.truncate(length)
        assert "copy it again" in refused(packed, cache)
    with packed.open("r+b") as file:
        file.truncate(100)
    assert "is no bundle" in refused(packed, cache)


def test_a_damaged_one_is_refused_with_the_part(packed: Path, tmp_path: Path) -> None:
    content = packed.read_bytes()
    place = content.index(bytes(range(256))) + 1000
    packed.write_bytes(content[:place] + b"!" + content[place + 1 :])
    assert "damaged (packages.tar" in refused(packed, tmp_path / "cache")


def test_a_member_that_is_not_in_the_manifest_is_refused(packed: Path, tmp_path: Path) -> None:
    with tarfile.open(packed, "a") as archive:
        archive.add(PROGRAM, "../../outside")
    assert "does not name" in refused(packed, tmp_path / "cache")


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "There is no bundle" in refused(tmp_path / "nothing.tar", cache)
    (tmp_path / "text").write_text("text")
    assert "is no bundle" in refused(tmp_path / "text", cache)


def problems(**changes: Any) -> list[str]:
    """What is wrong with a node for which all is well but these."""
    module = tree.module("roles/bundle/filter_plugins/bundle_problems.py")
    made = {
        "file": "b.tar", "system": {"distribution": "Debian", "version": "12", "machine": "x86_64"},
        "packages": ["chrony"], "unknown": ["systemd-resolved"], "torch": "cu130", "packages_bytes": 1 << 30,
        "wheelhouses": {"wheelhouse-abc": {"bytes": 1 << 30, "installed": 3 << 30}},
    }  # fmt: skip
    seen = {
        "distribution": "Debian", "distribution_major_version": "12", "machine": "x86_64",
        "missing": ["chrony", "systemd-resolved"], "files": {"/opt/aura/wheelhouse.complete": {"kind": "absent"}},
    }  # fmt: skip
    given = {"wheelhouse": "wheelhouse-abc", "build": "cpu", "room": 8 << 30, "driver": []}
    made |= {key: value for key, value in changes.items() if key in made}
    seen |= {key: value for key, value in changes.items() if key in seen}
    given |= {key: value for key, value in changes.items() if key in given}
    found: list[str] = module.bundle_problems(made, "node3", seen, **given)
    return found


def test_a_node_that_it_fits_has_no_problem() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"distribution": "Ubuntu", "distribution_major_version": "22"},
            "node3 runs Ubuntu 22 (x86_64), and b.tar is for",
        ),
        ({"machine": "aarch64"}, "node3 runs Debian 12 (aarch64)"),
        ({"missing": ["chrony", "nfs-common"]}, "needs the packages nfs-common"),
        ({"wheelhouse": "wheelhouse-def", "build": "cpu"}, "needs the wheels for torch's build cpu"),
        ({"room": 5 << 30}, "has 5.0 GiB left below /opt, and needs 7.0 GiB"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], sentence: str) -> None:
    (found,) = problems(**change)
    assert sentence in found


# What nvidia_driver decides for an RTX 3060 without a driver: the kernel's own packages belong to it.
DRIVER = [
    "linux-modules-nvidia-580-server-open-generic", "linux-headers-generic", "linux-image-generic",
    "nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server",
]  # fmt: skip


def test_a_node_whose_driver_is_not_in_it_is_refused_with_all_that_belongs_to_it() -> None:
    names = " ".join(DRIVER)
    (found,) = problems(driver=DRIVER, packages=["chrony", *DRIVER[:2]])
    assert f"does not have {', '.join(DRIVER[2:])}: write it again" in found
    assert f"(make bundle PACKAGES='{names}')" in found
    assert problems(driver=DRIVER, packages=["chrony", *DRIVER]) == []
    (found,) = problems(
        driver=DRIVER, packages=["chrony", *DRIVER[:4]], unknown=["systemd-resolved", DRIVER[4]]
    )
    assert f"does not have {DRIVER[4]}: apt did not know them" in found
    assert "restricted and multiverse" in found


def test_it_is_refused_before_any_node_is_changed() -> None:
    site = (tree.ROOT / "playbooks/site.yml").read_text()
    assert site.index("decide.yml") < site.index("tasks_from: fit.yml") < site.index("roles:\n    - {role:")
    assert "nvidia_driver_decision" in (tree.ROOT / "roles/bundle/tasks/fit.yml").read_text()
