"""Which releases stay on a node, and which one is used: with directories and a process of this machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tree

PROGRAM = "roles/trainer/files/use-release"
USE_RELEASE = tree.module(PROGRAM)


class Node:
    """A node with releases; `releases` is the program's view of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.environments = root / "opt", root / "etc"
        (self.root / "releases").mkdir(parents=True)
        self.environments.mkdir()
        self.releases: Any = USE_RELEASE.Releases(self.root, self.environments, Path("/proc"))

    def install(self, name: str) -> Path:
        place = self.root / "releases" / name
        place.mkdir()
        (place / "complete").touch()
        return place

    def site(self, name: str) -> None:
        """What site.yml does with a new trainer."""
        self.install(name)
        self.releases.use(name)
        self.releases.left.unlink(missing_ok=True)
        self.releases.prune()

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
    assert (node.releases.linked("current"), node.releases.linked("previous")) == ("c", "b")
    node.releases.use("c")
    assert node.releases.linked("previous") == "b"


def test_what_a_rank_was_launched_with_stays(node: Node) -> None:
    node.site("a")
    (node.environments / "rank-0.env").write_text(f"RANK=0\nAURA_RELEASE={node.root}/releases/a\n")
    for name in "bcd":
        node.site(name)
    assert node.there() == ["a", "c", "d"]


def test_what_somebody_runs_stays_until_he_has_ended(node: Node, sleeper: subprocess.Popen[bytes]) -> None:
    node.releases.use("a")
    for name in "bcd":
        node.site(name)
    assert node.there() == ["a", "c", "d"]
    sleeper.kill()
    sleeper.wait()
    node.releases.prune()
    assert node.there() == ["c", "d"]


def test_back_and_forward(node: Node) -> None:
    node.site("a")
    node.site("b")
    node.releases.back()
    assert (node.releases.linked("current"), node.releases.linked("previous")) == ("a", "b")
    assert node.releases.left.read_text() == "b\n"
    node.site("c")  # a trainer that has changed
    assert not node.releases.left.exists()
    assert (node.releases.linked("current"), node.releases.linked("previous")) == ("c", "a")


def test_without_a_previous_one_nothing_changes(node: Node) -> None:
    node.site("a")
    with pytest.raises(SystemExit, match="There is no previous release"):
        node.releases.back()
    assert node.releases.linked("current") == "a"
    assert not node.releases.left.exists()


def test_a_release_that_is_half_there_is_no_release(node: Node) -> None:
    node.site("a")
    node.site("b")
    (node.root / "releases/c").mkdir()
    with pytest.raises(SystemExit, match="c is not a complete release"):
        node.releases.use("c")
    assert node.releases.linked("current") == "b"
    (node.root / "releases/a/complete").unlink()
    with pytest.raises(SystemExit, match="There is no previous release"):
        node.releases.back()
    node.releases.prune()
    assert node.there() == ["b"]


def seen(current: str, previous: str, kind: str = "file") -> dict[str, Any]:
    links = {"current": f"releases/{current}", "previous": f"releases/{previous}" if previous else ""}
    files = {f"/opt/aura/{link}": {"target": target} for link, target in links.items()}
    return {"files": {**files, "/opt/aura/previous/complete": {"kind": kind}}}


@pytest.mark.parametrize(
    ("node1", "sentence"),
    [
        # Another build of the same trainers.
        (seen("bbbb-cpu-1", "aaaa-cpu-1"), ""),
        (seen("bbbb-cpu-1", ""), "node1 has no previous release to go back to: it has had bbbb-cpu-1 only."),
        (seen("bbbb-cpu-1", "aaaa-cpu-1", "absent"), "node1 has no previous release to go back to"),
        (seen("bbbb-cpu-1", "cccc-cpu-1"), "not had the same releases: bbbb to aaaa (node0); bbbb to cccc (node1)."),
    ],
)  # fmt: skip
def test_all_nodes_go_back_the_same_way_or_none(node1: dict[str, Any], sentence: str) -> None:
    problem = tree.plugin("filter/releases").rollback_problem
    said = problem({"node0": seen("bbbb-cu130-1", "aaaa-cu130-1"), "node1": node1})
    assert sentence in said if sentence else said == ""
