"""What make backup-keys saves, make restore-keys brings back, and neither overwrites anything."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import tree


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with one cluster that has been through bootstrap, and a lab."""
    root = tmp_path / "aura"
    for name, key in {"lan": "ours", "lab": "the lab's"}.items():
        state = root / "inventory" / name / "state"
        state.mkdir(parents=True, mode=0o700)
        (state / "id_ed25519").write_text(key)
        (state / "id_ed25519").chmod(0o600)
        (state / "known_hosts").write_text("node0 ssh-ed25519 AAAA\n")
        (state / "lock").write_text("what the last command was, and no key\n")
    shutil.copy(tree.ROOT / "inventory/keys", root / "inventory")
    shutil.copy(tree.ROOT / "Makefile", root)
    return root


def make(root: Path, target: str, file: Path, good: bool = True) -> str:
    done = subprocess.run(
        ["make", target, f"FILE={file}"], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == good, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_keys_come_back(repository: Path, tmp_path: Path) -> None:
    archive, state = tmp_path / "keys.tar.gz", repository / "inventory/lan/state"
    make(repository, "backup-keys", archive)
    assert archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == ["lan/state/id_ed25519", "lan/state/known_hosts"]
    shutil.rmtree(state)
    make(repository, "restore-keys", archive)
    assert (state / "id_ed25519").read_text() == "ours"
    assert (state / "id_ed25519").stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    assert "0 files written, 2 were there" in make(repository, "restore-keys", archive)


def test_nothing_is_overwritten(repository: Path, tmp_path: Path) -> None:
    archive, key = tmp_path / "keys.tar.gz", repository / "inventory/lan/state/id_ed25519"
    make(repository, "backup-keys", archive)
    before = archive.read_bytes()
    assert "stays as it is" in make(repository, "backup-keys", archive, good=False)
    assert archive.read_bytes() == before
    key.write_text("another one")
    (key.parent / "known_hosts").unlink()
    assert str(key) in make(repository, "restore-keys", archive, good=False)
    assert key.read_text() == "another one"
    assert not (key.parent / "known_hosts").exists(), "all or nothing"


def test_what_is_no_archive_of_keys_is_refused(repository: Path, tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar.gz"
    (tmp_path / "text").write_text("evil")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "text", "lan/state/../../../evil")
    assert "not our archive" in make(repository, "restore-keys", archive, good=False)
    assert not (tmp_path / "evil").exists()
    (tmp_path / "text.tar.gz").write_text("no archive")
    assert "cannot be read" in make(repository, "restore-keys", tmp_path / "text.tar.gz", good=False)
    assert "inside the repository" in make(repository, "backup-keys", repository / "keys.tar.gz", good=False)
