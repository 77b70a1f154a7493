"""Which releases stay on a node, and which one is used: with directories and a process of this machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree

PROGRAM = tree.ROOT / "roles/trainer/files/use-release"


class Node:
    """A node with releases."""

    def __init__(self, root: Path) -> None:
        self.root, self.environments = root / "opt", root / "etc"
        (self.root / "releases").mkdir(parents=True)
        self.environments.mkdir()

    def use(self, word: str) -> str:
        """What the program refuses; "" when it has done it."""
        command = [str(part) for part in (PROGRAM, word, self.root, self.environments)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    def linked(self, link: str) -> str:
        return (self.root / link).readlink().name

    def left(self) -> str:
        file = self.root / "rolled-back"
        return file.read_text().strip() if file.exists() else ""

    def install(self, name: str) -> Path:
        place = self.root / "releases" / name
        place.mkdir()
        (place / "complete").touch()
        return place

    def site(self, name: str) -> None:
        """What site.yml does with a new trainer."""
        self.install(name)
        assert self.use(name) == ""

    def there(self) -> list[str]:
        return sorted(path.name for path in (self.root / "releases").iterdir() if path.is_dir())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def sleeper(node: Node) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs from the release `a`."""
    place = node.install("a")
    code = "print('ready', flush=True); import time; time.sleep(60)"
    command = [sys.executable, "-c", code, str(place / "venv/bin/aura")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_the_current_and_the_previous_one_stay(node: Node) -> None:
    for name in "abc":
        node.site(name)
    assert node.there() == ["b", "c"]
    assert (node.linked("current"), node.linked("previous")) == ("c", "b")
    assert node.use("c") == ""
    assert node.linked("previous") == "b"


def test_what_a_rank_was_launched_with_stays(node: Node) -> None:
    node.site("a")
    (node.environments / "rank-0.env").write_text(f"RANK=0\nAURA_RELEASE={node.root}/releases/a\n")
    for name in "bcd":
        node.site(name)
    assert node.there() == ["a", "c", "d"]


def test_what_somebody_runs_stays_until_he_has_ended(node: Node, sleeper: subprocess.Popen[bytes]) -> None:
    node.use("a")
    for name in "bcd":
        node.site(name)
    assert node.there() == ["a", "c", "d"]
    sleeper.kill()
    sleeper.wait()
    node.use("d")
    assert node.there() == ["c", "d"]


def test_back_and_forward(node: Node) -> None:
    node.site("a")
    node.site("b")
    assert node.use("--back") == ""
    assert (node.linked("current"), node.linked("previous"), node.left()) == ("a", "b", "b")
    node.site("c")  # a trainer that has changed
    assert (node.linked("current"), node.linked("previous"), node.left()) == ("c", "a", "")


def test_a_release_that_is_half_there_is_no_release(node: Node) -> None:
    node.site("a")
    node.site("b")
    (node.root / "releases/c").mkdir()
    assert "c is not a complete release" in node.use("c")
    assert node.linked("current") == "b"
    (node.root / "releases/a/complete").unlink()
    assert "There is no previous release" in node.use("--back")
    assert node.use("b") == ""
    assert node.there() == ["b"]
