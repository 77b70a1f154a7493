"""Where torch.compile keeps its kernels, whatever a person calls the directories."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from aura.errors import ConfigError
from aura.run import compiled
from conftest import BOUND

CPU = torch.device("cpu")
NAMES = ["my run", "it's", '"mine"', "back\\slash", "two\nlines", "tab\there"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where links are made."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # What is set while it is undone afterwards, too.
    monkeypatch.setenv(compiled.VARIABLE, "")
    return tmp_path / "tmp"


def told() -> str:
    path = os.environ[compiled.VARIABLE]
    assert shlex.split(path) == [path]
    return path


def test_a_name_that_nobody_splits_is_taken_as_it_is(temporary: Path, tmp_path: Path) -> None:
    compiled.choose_directory(tmp_path / "año-1")
    assert told() == str(tmp_path / "año-1" / compiled.COMPILED)
    assert not [*temporary.iterdir()]


@pytest.mark.parametrize("name", NAMES)
def test_another_name_gets_a_link_which_stays_the_same(
    name: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = []
    for _ in range(2):  # starts
        monkeypatch.setenv(compiled.VARIABLE, "")
        compiled.choose_directory(tmp_path / name)
        links.append(told())
        assert compiled.directory() == tmp_path / name / compiled.COMPILED
        assert compiled.directory().is_dir()
    assert links[0] == links[1]
    assert Path(links[0]).parent.stat().st_mode & 0o777 == 0o700


def test_a_persons_own_directories_may_have_any_name_too(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tm p").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tm p"))
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path / "my kernels"))
    compiled.choose_directory(tmp_path / "run")
    told()
    assert compiled.directory() == tmp_path / "my kernels"
    assert not compiled.is_split(tempfile.gettempdir())
    assert os.environ["TMPDIR"] == tempfile.gettempdir()


def test_where_others_may_write_no_link_is_made(temporary: Path, tmp_path: Path) -> None:
    """They could put their own code there."""
    taken = temporary / f"aura-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    compiled.choose_directory(tmp_path / "my run")
    assert not Path(told()).is_relative_to(taken)
    assert compiled.directory() == tmp_path / "my run" / compiled.COMPILED


def test_torch_itself_in_such_a_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.check_path_of_torch(CPU)
    monkeypatch.setattr(torch, "__file__", "/home/ana/my project/torch/__init__.py")
    compiled.check_path_of_torch(torch.device("cuda"))  # nothing is linked with torch for a card
    with pytest.raises(ConfigError, match="libraries in /home/ana/my project/torch: "):
        compiled.check_path_of_torch(CPU)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_torch_compiles_there(tmp_path: Path) -> None:
    run, temporary = tmp_path / 'it\'s my "run"', tmp_path / "tm p"
    temporary.mkdir()
    program = (
        "import sys, torch; from pathlib import Path; from aura.run import compiled\n"
        "compiled.choose_directory(Path(sys.argv[1]))\n"
        "assert torch.compile(lambda x: 2 * x + 1)(torch.ones(99)).eq(3).all()"
    )
    environment = {name: value for name, value in os.environ.items() if name != compiled.VARIABLE}
    subprocess.run(
        [*BOUND, sys.executable, "-c", program, run], env=environment | {"TMPDIR": str(temporary)}, check=True
    )
    assert [*(run / compiled.COMPILED).rglob("*.so")]
