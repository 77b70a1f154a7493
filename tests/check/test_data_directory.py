"""Where runs and corpora lie on a node, whose they are, and what a reset leaves of them."""

import os
import subprocess
from pathlib import Path

import pytest
import tree
from expressions import filled_in, loaded, preflight_sentences, says

ELSEWHERE = "/mnt/ssd/aura"
PYTHON = {"own_python": "/usr/bin/python3.10", "python": "/usr/bin/python3.10"}


def said_of(directory: str = "/var/lib/aura", journal: str = "1G", **there: str) -> str:
    """there: what the first task of preflight.yml has read, where it is not empty."""
    lines = [f"{name}={value}" for name, value in (PYTHON | there).items()]
    settings = {"base_data_directory": directory, "base_journal_max": journal}
    return preflight_sentences("base", {"__base_read": {"stdout_lines": lines}}, **settings)


OURS = {"named": ELSEWHERE, "mounted": "yes"}


@pytest.mark.parametrize(
    ("directory", "there", "sentence"),
    [
        ("/var/lib/aura", {}, ""),
        ("/var/lib/aura", {"mounted": "yes"}, ""),  # a partition of its own
        (ELSEWHERE, {"where": "/", "type": "ext4"}, ""),
        (ELSEWHERE, OURS, ""),
        (ELSEWHERE, OURS | {"was_on": "/mnt/ssd", "where": "/mnt/ssd", "file": "/var/lib/aura/runs/x"}, ""),
        (ELSEWHERE, {"theirs": "ubuntu"}, "which is ubuntu's there and not empty"),
        ("ssd", {}, "an absolute path of at least two names"),
        ("/home/ubuntu", {"theirs": "ubuntu"}, "lies in somebody's home"),
        ("/home/ubuntu/data", {}, "lies in somebody's home"),
        ("/var/lib", {"theirs": "root"}, "does not belong to the system"),
        ("/etc/ssh", {"theirs": "root"}, "does not belong to the system"),
        (ELSEWHERE, {"file": "/var/lib/aura/runs/x"}, "files in /var/lib/aura, which would be hidden"),
        (ELSEWHERE, {"type": "exfat"}, "which lies on exfat, where files have no owners"),
        ("/mnt/nas/aura", {"type": "nfs4"}, "a checkpoint waits for the network"),
        (ELSEWHERE, {"mounted": "yes"}, "is another directory there (mounted by hand)"),
        (ELSEWHERE, OURS | {"named": "/mnt/ssd/aura2"}, "is another directory there (/mnt/ssd/aura2)"),
        ("/var/lib/aura", OURS, "is another directory there (/mnt/ssd/aura)"),
        (  # booted without its disk: nothing is made in its place
            ELSEWHERE,
            {"named": ELSEWHERE, "was_on": "/mnt/ssd", "where": "/", "file": "/var/lib/aura/x"},
            "lay in the file system at /mnt/ssd, and now lies in the one at /. Is its disk off?",
        ),
    ],
)  # fmt: skip
def test_data_have_a_place_and_nothing_is_hidden(
    directory: str, there: dict[str, str], sentence: str
) -> None:
    said = said_of(directory, **there)
    assert sentence in said if sentence else said == ""
    assert said.count("data_directory is") <= 1, "one reason is enough"


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ({"python": "/usr/bin/python3.11"}, "and no longer the distribution's own /usr/bin/python3.10"),
        ({"taken": "user ubuntu 2500, group aura 997"}, "already: user ubuntu 2500, group aura 997 (name"),
        ({"links": "/var/lib/aura/runs (to /mnt/big) "}, "Remove the link (sudo rm)"),
    ],
)
def test_what_stands_in_the_way_is_said_at_once(there: dict[str, str], sentence: str) -> None:
    said = said_of("ssd", "1 GB", **there)
    for part in (sentence, "an absolute path", "base_journal_max is 1 GB, which journald does not take"):
        assert part in said


def test_data_are_not_mounted_without_their_disk() -> None:
    """systemd makes the source of a bind mount itself; a condition in place of an assertion would let ranks start."""
    text = (tree.ROOT / "roles/base/templates/var-lib-aura.mount.j2").read_text()
    unit = filled_in(text, {"base_data_directory": ELSEWHERE, "__base_there": {"where": "/mnt/ssd"}})
    assert "AssertPathIsMountPoint=/mnt/ssd\n" in unit
    assert f"AssertPathIsDirectory={ELSEWHERE}\n" in unit


def reset(tmp_path: Path, places: list[Path], *, check: bool = False, user: str = "") -> str:
    """What the last task of remove.yml says when these are the places of aura's files. user: in aura's place."""
    commands = tmp_path / "commands"
    commands.mkdir(exist_ok=True)
    for name in ("getent", "userdel"):
        (commands / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/called\n")
        (commands / name).chmod(0o755)
    task = loaded("roles/base/tasks/remove.yml")[0]["block"][-1]
    known = {"__base_places": [str(place) for place in places], "ansible_check_mode": check}
    script = str(filled_in(task["ansible.builtin.shell"], known))
    script = script.replace("-user aura", f"-user {user or tmp_path.owner()}")
    (tmp_path / "called").unlink(missing_ok=True)
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stderr == ""
    return done.stdout + (tmp_path / "called").read_text()


def test_a_reset_takes_the_user_and_empty_directories_where_no_file_is_left(tmp_path: Path) -> None:
    assert says("base", "__base_places") == ["/var/lib/aura"]
    settings = {"base_data_directory": ELSEWHERE, "base_shared_directory": "/srv/aura"}
    assert says("base", "__base_places", **settings) == [ELSEWHERE, "/var/lib/aura", "/srv/aura"]

    empty, full, link, absent = (tmp_path / name for name in ("empty", "full", "link", "absent"))
    for directory in ("empty/runs", "empty/corpora", "full/runs", "full/corpora"):
        (tmp_path / directory).mkdir(parents=True)
    (full / "runs/mine").write_text("weights")
    link.symlink_to("empty")
    for kept in ([empty, full], [link, empty]):
        assert reset(tmp_path, kept) == "getent\n"
    assert reset(tmp_path, [empty, absent], check=True) == "removed\ngetent\n"
    assert (empty / "runs").exists() and (full / "corpora").exists()
    # Of somebody else nothing goes.
    reset(tmp_path, [empty], user="nobody")
    assert empty.exists()
    assert reset(tmp_path, [empty, absent]) == "removed\ngetent\nuserdel\n"
    assert not empty.exists()
