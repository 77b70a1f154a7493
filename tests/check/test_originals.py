"""What a role replaces is kept before its first change, and comes back; what is not its own stays."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tree


@pytest.fixture
def originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = tree.plugin("module_utils/node_originals")
    monkeypatch.setattr(module, "BACKUPS", str(tmp_path / "backups"))
    monkeypatch.setattr(module, "MADE_IN", (f"{tmp_path}/",))
    monkeypatch.setattr(module, "NEVER_WHOLE", str(tmp_path / "precious"))
    return module


def kept(module: ModuleType, *makes: Path | str, role: str = "some") -> list[str]:
    found: list[str] = module.keep(role, [str(path) for path in makes], [], [], [])
    return found


def what(module: ModuleType) -> dict[str, str]:
    return {Path(step["path"]).name: step["what"] for step in module.plan([], [])}


def test_a_replaced_file_comes_back_as_it_was(originals: ModuleType, tmp_path: Path) -> None:
    file, made, link = tmp_path / "file", tmp_path / "made", tmp_path / "link"
    file.write_text("theirs\n")
    file.chmod(0o640)
    link.symlink_to("/somewhere")
    kept(originals, file, made, link)
    file.write_text("ours\n")
    file.chmod(0o644)
    made.write_text("ours\n")
    link.unlink()
    link.symlink_to("/dev/null")
    # A second change finds the first one's files, and does not take them for originals.
    assert kept(originals, file, made, link) == []

    assert what(originals) == {"file": "restore", "made": "remove", "link": "restore"}
    result = originals.put_back([], [])
    assert file.read_text() == "theirs\n"
    assert file.stat().st_mode & 0o777 == 0o640
    assert not made.exists()
    assert str(link.readlink()) == "/somewhere"
    # What went is not lost.
    assert Path(result["went"] + str(made)).read_text() == "ours\n"
    assert Path(result["went"] + str(file)).read_text() == "ours\n"
    assert not (tmp_path / "backups/manifest.json").exists()
    assert originals.put_back([], [])["done"] == []


def test_directories_go_when_they_are_empty_or_wholly_ours(originals: ModuleType, tmp_path: Path) -> None:
    ours, full, empty, old = (tmp_path / name for name in ("ours", "full", "empty", "old"))
    old.mkdir(mode=0o700)
    kept(originals, f"{ours}/", full, empty, old)
    for folder in (ours, full, empty):
        folder.mkdir()
    (ours / "deep").mkdir()
    (ours / "deep/file").touch()
    (full / "theirs").touch()
    old.chmod(0o755)
    (old / "theirs").touch()
    originals.put_back([], [])
    assert not ours.exists()
    assert not empty.exists()
    assert (full / "theirs").exists()
    assert (old / "theirs").exists()
    assert old.stat().st_mode & 0o777 == 0o700


def test_runs_and_corpora_are_never_removed_as_a_whole(originals: ModuleType, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    kept(originals, f"{precious}/", f"{precious}/runs/")
    (precious / "runs").mkdir(parents=True)
    (precious / "runs/checkpoint").touch()
    assert set(what(originals).values()) == {"stays: it is never removed with what is in it"}
    originals.put_back([], [])
    assert (precious / "runs/checkpoint").exists()


def test_our_own_file_from_before_there_was_a_manifest_is_no_original(
    originals: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("# Written by Ansible (role some); changes are overwritten.\n")
    kept(originals, file)
    assert what(originals) == {"file": "remove"}


def test_a_pattern_keeps_the_files_of_others(originals: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "50-theirs.yaml").write_text("theirs")
    kept(originals, f"{tmp_path}/*.yaml", tmp_path / "90-ours.yaml")
    (tmp_path / "50-theirs.yaml").unlink()
    (tmp_path / "90-ours.yaml").write_text("ours")
    assert originals.as_change(["some"]) == [
        {"path": str(tmp_path / "50-theirs.yaml"), "content": "theirs", "mode": "0644"},
        {"path": str(tmp_path / "90-ours.yaml"), "absent": True},
    ]


def test_what_a_role_only_looks_at_is_left_alone(originals: ModuleType) -> None:
    assert kept(originals, "/dev/null", "/proc/self/mounts", "/run/aura-firewall.loaded") == []


def test_one_roles_part_goes_and_the_others_stay(originals: ModuleType, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    kept(originals, one, role="first")
    kept(originals, two, role="second")
    one.touch()
    two.touch()
    originals.put_back([], ["second"])
    assert not one.exists()
    assert two.exists()
    assert list(json.loads((tmp_path / "backups/manifest.json").read_text())["paths"]) == [str(two)]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on another disk"])
def test_the_user_of_runs_on_another_disk_stays(
    originals: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """Unmounted, their home looks as if nothing were left of them."""
    units, home = tmp_path / "units", tmp_path / "precious"
    unit = units / "var-lib-aura.mount"
    ran: list[str] = []

    def run(command: list[str]) -> list[str]:
        ran.append(command[0])
        return []

    monkeypatch.setattr(originals, "UNITS", f"{units}/")
    monkeypatch.setattr(originals, "run", run)
    kept(originals, unit, home)
    manifest = originals.read_manifest()
    originals.write_manifest({**manifest, "users": {"aura": "some"}})
    aura = SimpleNamespace(pw_name="aura", pw_dir=str(home))
    monkeypatch.setattr(originals.pwd, "getpwall", lambda: [aura])
    home.mkdir()
    if elsewhere:
        units.mkdir()
        unit.write_text(
            "# Written by Ansible (role base)\n[Mount]\nWhat=/mnt/ssd/aura\nWhere=/var/lib/aura\n"
        )

    result = originals.put_back([], [])
    assert not home.exists()
    assert ("userdel" in ran) is not elsewhere
    assert result["data"] == ("/mnt/ssd/aura" if elsewhere else "")
