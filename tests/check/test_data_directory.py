"""Where runs and corpora lie on a node, whose they are, and what a reset leaves of them."""

import os
import subprocess
from pathlib import Path

import pytest
import tree
from expressions import filled_in, loaded, preflight_sentences

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
