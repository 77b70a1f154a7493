"""The program that changes and undoes, with files of this machine. What needs systemd: tests/vm/test_rollback.py."""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tree


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting is not possible here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def program(disk: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """It keeps what it knows on the small disk, and has nobody to call."""
    module = tree.module("roles/safe_change/files/safe-change")
    state = disk / "state"
    state.mkdir()
    known = {"STATE": state, "CURRENT": state / "current", "LAST": state / "last.json"}
    for name, path in {**known, "MARKER": state / "current/marker.json"}.items():
        monkeypatch.setattr(module, name, path)
    monkeypatch.setattr(module, "WRITABLE", (str(disk),))
    monkeypatch.setattr(module, "systemctl", lambda *words: False)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    run = module.run
    monkeypatch.setattr(
        module, "run", lambda words, *more: "" if words[0] == "systemd-run" else run(words, *more)
    )
    return module


def begun(program: ModuleType, path: Path, content: str, **more: Any) -> str:
    plan = {"of": "a test", "seconds": 60, "directories": [], "check": "", "apply": [], "undo": []}
    made = program.begin_now({**plan, "files": [{"path": str(path), "content": content}], **more})
    return str(made["id"])


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_no_hindrance_to_the_way_back(program: ModuleType, disk: Path) -> None:
    file, undone = disk / "settings", disk / "undone"
    file.write_text("old\n" * 3000)
    file.chmod(0o640)
    identity = begun(program, file, "new\n" * 3000, undo=[["ln", "-s", "x", str(undone)]])
    program.apply(identity)
    assert file.read_text().startswith("new")
    fill(disk)
    program.undo(identity, when_due=False, why="nobody came")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("old\n" * 3000, 0o640)
    assert undone.is_symlink() and not program.MARKER.exists()


def test_a_change_that_finds_no_room_says_so_and_is_undone(program: ModuleType, disk: Path) -> None:
    file = disk / "settings"
    file.write_text("old\n")
    identity = begun(program, file, "new\n" * 30000)
    fill(disk)
    program.apply(identity)
    assert file.read_text() == "old\n" and not program.MARKER.exists()
    (disk / "filler").unlink()
    identity = begun(program, file, "new\n" * 40000)
    fill(disk)
    (disk / "filler").open("r+").truncate(8192)  # room to say why
    program.apply(identity)
    assert "No space left on device" in program.how_it_ended(identity)["why"]


def test_a_disk_on_which_nothing_can_be_linked_has_room_for_the_way_back(
    program: ModuleType, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at boot, where /etc and /var are mounts of their own for the unit."""

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(program.os, "link", link)
    files = [disk / "first", disk / "settings"]
    for file in files:
        file.write_text("old\n" * 3000)
    plan = [{"path": str(file), "content": "new\n" * 3000} for file in files]
    identity = begun(program, files[0], "", files=plan)
    program.apply(identity)
    fill(disk)
    program.boot()
    assert [file.read_text() for file in files] == ["old\n" * 3000] * 2 and not program.MARKER.exists()


def test_who_is_asked_while_the_marker_stands_does_not_say_confirmed(program: ModuleType, disk: Path) -> None:
    """Killed between the two: how it ended is written before the marker goes."""
    identity = begun(program, disk / "settings", "new")
    program.apply(identity)
    program.write_json(program.LAST, {"id": identity, "outcome": "confirmed", "why": "it was proved"})
    program.confirm(identity)
    assert not program.MARKER.exists()


def test_an_undo_that_fails_at_first_is_tried_again(program: ModuleType, disk: Path) -> None:
    tries = disk / "tries"
    script = f"echo >>{tries}; [ $(wc -l <{tries}) -ge 2 ]"
    identity = begun(program, disk / "settings", "new", undo=[["sh", "-c", script]])
    program.apply(identity)
    program.undo(identity, when_due=False, why="nobody came")
    assert tries.read_text() == "\n\n"
    assert program.how_it_ended(identity)["why"] == "nobody came"


def test_who_asks_again_whether_it_stays_hears_the_same(program: ModuleType, disk: Path) -> None:
    """The answer may be lost on its way."""
    identity = begun(program, disk / "settings", "new")
    program.apply(identity)
    assert program.confirm(identity) == program.confirm(identity)
    assert json.loads(program.LAST.read_text())["outcome"] == "confirmed"
    assert (disk / "settings").read_text() == "new"
