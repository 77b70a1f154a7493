"""A bundle is opened whole or not at all, and says in a sentence what is wrong with it."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tree

SYSTEM = {"distribution": "Ubuntu", "version": "22", "machine": "x86_64"}
NEEDED = (
    "roles/bundle/files/bundle", "roles/bundle/files/gather-packages", "roles/python_env/files/download-wheelhouse",
    "plugins/filter/releases.py", "requirements/torch.in",
)  # fmt: skip


def bundle(repository: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, repository / "roles/bundle/files/bundle", *words],
        input=stdin, text=True, capture_output=True, check=False,
    )  # fmt: skip


def wheel(path: Path, **files: str) -> str:
    """Write a wheel with these files; its line for a lock file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    name, version = path.name.split("-")[:2]
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Parts:
    """What a small bundle of all kinds of members is made of, and a repository with the lock files for it."""

    def __init__(self, home: Path) -> None:
        self.repository, self.home = home / "repository", home
        for name in NEEDED:
            (self.repository / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree.ROOT / name, self.repository / name)
        locks = self.repository / "requirements"
        self.house, self.controller = home / "wheelhouse-abc", home / "controller"
        one = wheel(self.house / "wheels/one-1.0-py3-none-any.whl", **{"one.py": "x" * 5000})
        torch = wheel(self.house / "wheels/torch-2-py3-none-any.whl")
        uv = wheel(self.controller / "wheels/uv-1-py3-none-any.whl", **{"uv-1.data__scripts__uv": "locked"})
        for place in (locks / "node.txt", self.house / "requirements.txt"):
            place.write_text(one)
        (self.house / "torch.txt").write_text(torch)
        (locks / "torch-cu130.txt").write_text(torch)
        (locks / "controller.txt").write_text(f"one==1.0 \\\n    --hash=sha256:{'0' * 64}\n{uv}")
        (self.house / "uv").write_text("anybody's")
        (self.house / "python/bin").mkdir(parents=True)
        program = self.house / "python/bin/python3.11"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        (self.house / "python/bin/python3").symlink_to("python3.11")
        self.packages = home / "packages"
        (self.packages / "0/pool").mkdir(parents=True)
        (self.packages / "none").mkdir()
        (self.packages / "0/pool/a_1_all.deb").write_bytes(bytes(range(256)) * 4000)
        (self.packages / "apt.conf").write_text(tree.module("roles/bundle/files/gather-packages").APT_CONF)
        (self.packages / "sources.list").write_text(
            "deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] "
            "file:/opt/aura/packages/0 jammy-security main universe\n"
        )

    def packed(self, **facts: Any) -> Path:
        with tarfile.open(self.home / "packages.tar", "w") as archive:
            archive.add(self.packages, "packages")
        contents = {"packages.tar": self.home / "packages.tar", "controller": self.controller}
        contents[self.house.name] = self.house
        asked = {"facts": {"system": SYSTEM, "build": "cpu", **facts}, "contents": contents}
        file = self.home / "bundle.tar"
        done = bundle(self.repository, "pack", str(file), stdin=json.dumps(asked, default=str))
        assert done.returncode == 0, done.stderr
        return file

    def opened(self) -> Path:
        """The wheelhouse of the bundle, on the controller."""
        done = bundle(self.repository, "open", str(self.home / "bundle.tar"), str(self.home / "cache"))
        assert done.returncode == 0, done.stderr
        return self.home / "cache" / self.house.name

    def refused(self) -> str:
        return refused(self.packed())


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


@pytest.fixture
def packed(parts: Parts) -> Path:
    return parts.packed()


def refused(file: Path) -> str:
    cache = file.parent / "cache"
    done = bundle(file.parent / "repository", "open", str(file), str(cache))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert list(cache.glob("*")) == [], "something was left behind"
    return done.stderr


def test_it_is_taken_apart_where_the_roles_look(packed: Path, tmp_path: Path) -> None:
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    said = json.loads(bundle(repository, "open", str(packed), str(cache)).stdout)
    assert said["wheelhouses"]["wheelhouse-abc"]["installed"] == 5000
    assert (Path(said["directory"]) / "packages.tar").stat().st_size == said["packages_bytes"] > 256 * 4000
    house = cache / "wheelhouse-abc"
    assert (house / "python/bin/python3").readlink() == Path("python3.11")
    assert (house / "python/bin/python3.11").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in cache.iterdir()) == [Path(said["directory"]).name, "wheelhouse-abc"]
    # Again: nothing is read any more, so that it does not matter what has become of the file's end.
    with packed.open("r+b") as file:
        file.truncate(20480)
    assert json.loads(bundle(repository, "open", str(packed), str(cache)).stdout) == said


def test_a_truncated_one_is_refused(packed: Path) -> None:
    size = packed.stat().st_size
    for length, sentence in (
        (size // 2, "copy it again"),
        (size - 15000, "copy it again"),  # zeros at its end
        (100, "is no bundle"),
    ):
        os.truncate(packed, length)
        assert sentence in refused(packed), length


def test_a_damaged_one_is_refused_with_the_part(packed: Path) -> None:
    content = packed.read_bytes()
    place = content.index(bytes(range(256))) + 1000
    packed.write_bytes(content[:place] + b"!" + content[place + 1 :])
    assert "damaged (packages.tar" in refused(packed)


def test_a_member_that_is_not_in_the_manifest_is_refused(packed: Path) -> None:
    with tarfile.open(packed, "a") as archive:
        archive.add(__file__, "../../outside")
    assert "does not name" in refused(packed)


def rewritten(file: Path, change: Callable[[dict[str, Any]], None], *more: tarfile.TarInfo) -> None:
    """The same bundle with another manifest and more members."""
    whole = file.with_suffix(".new")
    with tarfile.open(file) as old, tarfile.open(whole, "w") as new:
        for member in old:
            content = old.extractfile(member)
            text = content.read() if content else b""
            if member.name == "manifest.json":
                manifest = json.loads(text)
                change(manifest)
                text = json.dumps(manifest).encode()
                member.size = len(text)
            new.addfile(member, io.BytesIO(text) if content else None)
        for extra in more:
            new.addfile(extra)
    whole.replace(file)


@pytest.mark.parametrize(
    ("link", "target", "below"),
    [
        ("x", "/elsewhere", "x/authorized_keys"),
        ("wheelhouse-abc/python/x", "../../../elsewhere", "wheelhouse-abc/python/x/authorized_keys"),
        ("wheelhouse-abc/python/x", "../../../elsewhere", ""),
        ("wheelhouse-abc/python/x", "bin/../../../../elsewhere", ""),
        ("wheelhouse-abc/python/x", "/elsewhere", ""),
        ("wheelhouse-abc/python/x", "..", ""),
        ("wheelhouse-abc/python/x", "bin", "wheelhouse-abc/python/x/authorized_keys"),
        ("wheelhouse-abc/python/x", "bin", "wheelhouse-abc/python//x/authorized_keys"),
        ("wheelhouse-abc/wheels/x.whl", "../python/bin/python3.11", ""),
        ("wheelhouse-abc/python", "/elsewhere", ""),
        ("../x", "bin", ""),
        ("", "", "/elsewhere/authorized_keys"),
        ("", "", "controller/../../elsewhere"),
        ("", "", "state/id_ed25519"),
    ],
)
def test_it_writes_nowhere_but_into_its_own_folders(packed: Path, link: str, target: str, below: str) -> None:
    """Nor is there a link in them that leads out."""
    extra = [tarfile.TarInfo(name) for name in (link, below) if name]
    if link:
        extra[0].type, extra[0].linkname = tarfile.SYMTYPE, target

    def change(manifest: dict[str, Any]) -> None:
        manifest["links"] |= {link: target} if link else {}
        manifest["files"] |= {below: {"sha256": hashlib.sha256().hexdigest(), "bytes": 0}} if below else {}

    rewritten(packed, change, *extra)
    assert "belongs in no bundle" in refused(packed)


def test_what_is_said_to_be_a_wheelhouse_is_one(packed: Path) -> None:
    rewritten(packed, lambda manifest: manifest["wheelhouses"].update({"../elsewhere": {"installed": 0}}))
    assert "belongs in no bundle" in refused(packed)


def test_a_wheelhouse_has_the_uv_that_the_lock_file_names(parts: Parts) -> None:
    parts.packed()
    uv = parts.opened() / "uv"
    assert uv.read_text() == "locked" and os.access(uv, os.X_OK)


def test_without_the_locked_uv_it_is_refused(parts: Parts) -> None:
    wheel(parts.controller / "wheels/uv-1-py3-none-any.whl", **{"uv-1.data__scripts__uv": "somebody's"})
    assert "it lacks uv as requirements/controller.txt locks it" in parts.refused()


@pytest.mark.parametrize("file", ["requirements.txt", "torch.txt"])
def test_lock_files_that_are_not_ours_are_refused(parts: Parts, file: str) -> None:
    """That of torch too, under the name that belongs to a build with a lock file here."""
    name = tree.plugin("filter/releases").wheelhouse(
        "cu130", "Ubuntu 22", str(parts.repository / "requirements/node.txt"), "",
        str(parts.repository / "roles/python_env/files/download-wheelhouse"),
    )["name"]  # fmt: skip
    parts.house = parts.house.rename(parts.home / f"wheelhouse-{name}")
    parts.packed()
    parts.opened()
    shutil.rmtree(parts.home / "cache")
    (parts.house / file).write_text(wheel(parts.house / "wheels/one-1.0-py3-none-any.whl", other="x"))
    assert f"{file} is not " in parts.refused()


def test_a_wheel_that_no_lock_file_has_is_refused(parts: Parts) -> None:
    wheel(parts.house / "wheels/one-1.0-py3-none-any.whl", other="x")
    assert "one-1.0-py3-none-any.whl, whose hash no lock file has" in parts.refused()


def test_a_python_where_the_system_has_its_own_is_refused(parts: Parts) -> None:
    file = parts.packed(system=SYSTEM | {"distribution": "Debian", "version": "12"})
    assert "Debian 12 has its own Python" in refused(file)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("apt.conf", 'APT::Update::Pre-Invoke { "id"; };\n'),
        ("sources.list", "deb [trusted=yes] file:/opt/aura/packages/0 jammy main\n"),
        ("sources.list", "deb [trusted=yes] file:/opt/aura/packages/0 jammy main"),
        ("none/one.conf", 'APT::Update::Pre-Invoke { "id"; };\n'),
        ("extra", ""),
    ],
)
def test_what_apt_is_told_is_ours(parts: Parts, file: str, text: str) -> None:
    (parts.packages / file).write_text(text)
    assert f"packages.tar holds packages/{file}" in parts.refused()


def test_a_link_or_a_program_with_roots_rights_among_the_packages_is_refused(parts: Parts) -> None:
    (parts.packages / "0/link").symlink_to("/etc")
    assert "packages.tar holds packages/0/link" in parts.refused()
    (parts.packages / "0/link").unlink()
    (parts.packages / "0/a").touch()
    (parts.packages / "0/a").chmod(0o4755)
    assert "packages.tar holds packages/0/a" in parts.refused()


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    Parts(tmp_path)
    assert "There is no bundle" in refused(tmp_path / "nothing.tar")
    (tmp_path / "text").write_text("text")
    assert "is no bundle" in refused(tmp_path / "text")


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
        "mounts": {"/opt": {"free": 8 << 30}},
    }  # fmt: skip
    given = {"wheelhouse": "wheelhouse-abc", "build": "cpu", "driver": []}
    for part in (made, seen, given):
        part |= {key: value for key, value in changes.items() if key in part}
    found: list[str] = module.bundle_problems(made, "node3", seen, **given)
    return found


UBUNTU = {"distribution": "Ubuntu", "distribution_major_version": "22"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (UBUNTU, "node3 runs Ubuntu 22 (x86_64), and b.tar is for"),
        ({"machine": "aarch64"}, "node3 runs Debian 12 (aarch64)"),
        ({"missing": ["chrony", "nfs-common"]}, "needs the packages nfs-common"),
        ({"wheelhouse": "wheelhouse-def", "build": "cpu"}, "needs the wheels for torch's build cpu"),
        ({"mounts": {"/opt": {"free": 5 << 30}}}, "has 5.0 GiB left below /opt, and needs 7.0 GiB"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], sentence: str) -> None:
    (found,) = problems(**change)
    assert sentence in found


def test_a_node_that_it_fits_has_no_problem() -> None:
    assert problems() == []


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
    unknown = ["systemd-resolved", DRIVER[4]]
    (found,) = problems(driver=DRIVER, packages=["chrony", *DRIVER[:4]], unknown=unknown)
    assert f"does not have {DRIVER[4]}: apt did not know them" in found
    assert "restricted and multiverse" in found
