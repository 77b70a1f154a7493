"""Where runs and corpora lie on a node, whose they are, and what a reset leaves of them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded, problems, says
from test_shared_files import ABSENT, FREE, HOME, OURS_THERE, SYSTEM, THEIRS

DIRECTORIES = ("/var/lib/aura", "/var/lib/aura/corpora", "/var/lib/aura/runs", "/opt/aura")
UNIT_FILE = "/etc/systemd/system/var-lib-aura.mount"


def data(directory: str, here: dict[str, Any], there: dict[str, Any], unit: str = "") -> dict[str, Any]:
    """unit: the text of our mount unit, as far as it matters."""
    return {
        "data_directory": directory,
        "node": {
            "taken": [], "users": {}, "groups": {},
            "mounts": {"/var/lib/aura": {**FREE, **here}}
            | ({directory: {**FREE, **there}} if directory != "/var/lib/aura" else {}),
            "files": dict.fromkeys([*DIRECTORIES, directory], ABSENT)
            | {UNIT_FILE: {**ABSENT, "kind": "file" if unit else "absent"}},
            "texts": {UNIT_FILE: unit},
        },
    }  # fmt: skip


OURS = "What=/mnt/ssd/aura\n"
ON_SSD = f"AssertPathIsMountPoint=/mnt/ssd\n{OURS}"


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (data("/var/lib/aura", {"used": True}, {}), ""),
        (data("/var/lib/aura", {"mounted": True}, {}), ""),  # a partition of its own
        (data("/mnt/ssd/aura", {}, {}), ""),
        (data("/mnt/ssd/aura", {"mounted": True}, {}, unit=OURS), ""),  # as roles before wrote it
        (data("/mnt/ssd/aura", {"mounted": True, "used": True}, OURS_THERE, unit=OURS), ""),
        (data("/mnt/ssd/aura", {"mounted": True}, {**OURS_THERE, "where": "/mnt/ssd"}, unit=ON_SSD), ""),
        (data("/mnt/ssd/aura", {}, OURS_THERE), ""),
        (data("/mnt/ssd/aura", {}, {"owner": "2500", "empty": False}), ""),  # its user is not there yet
        (data("/mnt/ssd/aura", {}, THEIRS), "which is ubuntu's there and not empty"),
        (data("ssd", {}, {}), "no absolute path of at least two names"),
        (data("/home/ubuntu", {}, THEIRS), HOME),
        (data("/home/ubuntu/data", {}, {}), HOME),
        (data("/var/lib", {}, {"owner": "root", "empty": False}), SYSTEM),
        (data("/etc/ssh", {}, {"owner": "root", "empty": False}), SYSTEM),
        (data("/mnt/ssd/aura", {"used": True}, {}), "there are files in /var/lib/aura, which would be hidden"),
        (
            data("/mnt/ssd/aura", {}, {"type": "exfat", "source": "/dev/sdb1"}),
            "lies on /dev/sdb1 (exfat), where files have no owners",
        ),
        (data("/mnt/nas/aura", {}, {"type": "nfs4", "source": "nas:/a"}), "training would wait for the network"),
        (
            data("/mnt/ssd/aura", {"mounted": True}, {}, unit="What=/mnt/ssd/aura2\n"),
            "/var/lib/aura is another directory there already",
        ),
        (data("/var/lib/aura", {"mounted": True}, {}, unit=OURS), "and data_directory does not say so"),
        (  # booted without its disk: nothing is made in its place
            data("/mnt/ssd/aura", {"used": True}, {"where": "/"}, unit=ON_SSD),
            "lay in the file system at /mnt/ssd, and now lies in the one at /. Is its disk off?",
        ),
    ],
)  # fmt: skip
def test_data_have_a_place_and_nothing_is_hidden(seen: dict[str, Any], sentence: str) -> None:
    said = problems("base", **seen)
    assert sentence in said if sentence else said == ""


def test_data_are_not_mounted_without_their_disk() -> None:
    """systemd makes the source of a bind mount itself; a condition in place of an assertion would let ranks start."""
    text = (tree.ROOT / "roles/base/templates/var-lib-aura.mount.j2").read_text()
    there = {"mounts": {"/mnt/ssd/aura": {"where": "/mnt/ssd"}}}
    unit = filled_in(text, {"base_data_directory": "/mnt/ssd/aura", "__base_seen": there})
    assert "AssertPathIsMountPoint=/mnt/ssd\n" in unit
    assert "AssertPathIsDirectory=/mnt/ssd/aura\n" in unit
    # The role knows its own unit again.
    assert problems("base", **data("/mnt/ssd/aura", {}, {"where": "/"}, unit=unit)) != ""


@pytest.mark.parametrize("link", [*DIRECTORIES, "/mnt/ssd/aura"])
def test_a_link_is_refused_and_not_followed(link: str) -> None:
    """Aura may have made it, or a person with a larger disk, for whom an empty directory would take its place."""
    seen = data("/mnt/ssd/aura", {}, {})
    seen["node"]["files"][link] = {**ABSENT, "kind": "link", "target": "/mnt/big"}
    sentence = f"{link} is a link there (to /mnt/big), and has to be a directory."
    assert problems("base", **seen).startswith(sentence)


@pytest.mark.parametrize("used", ["", "/var/lib/aura", "/mnt/ssd/aura", "/srv/aura"])
def test_a_reset_keeps_the_user_while_files_of_theirs_are_left(used: str) -> None:
    settings = {"base_data_directory": "/mnt/ssd/aura", "base_shared_directory": "/srv/aura"}
    places = says("base", "__base_places", **settings)
    left = {"users": {"aura": {}}, "mounts": {place: {**FREE, "used": place == used} for place in places}}
    (task,) = (one for one in loaded("roles/base/tasks/remove.yml") if "remove_user.yml" in one.values())
    assert says("base", task["when"], __base_left=left) is (used == "")
    assert says("base", "__base_places") == ["/var/lib/aura"]


def test_a_reset_takes_empty_directories_only(tmp_path: Path) -> None:
    empty, full, link = (tmp_path / name for name in ("empty", "full", "link"))
    for directory in ("empty/runs", "empty/corpora", "full/runs/deep", "full/corpora"):
        (tmp_path / directory).mkdir(parents=True)
    (full / "runs/mine").write_text("weights")
    link.symlink_to("full")
    command = "ansible.builtin.command"
    (task,) = (one for one in loaded("roles/base/tasks/remove_user.yml") if command in one)
    places = [str(place) for place in (empty, full, link, tmp_path / "absent")]
    argv = filled_in(task[command]["argv"], {"__base_places": places})

    def reset(user: str) -> None:
        words = [user if word == "aura" else word for word in argv]
        subprocess.run(words, capture_output=True, check=False)

    reset(tmp_path.owner())
    assert not empty.exists()
    assert link.is_symlink()
    assert sorted(str(path.relative_to(full)) for path in full.rglob("*")) == ["runs", "runs/mine"]
    # Of somebody else nothing goes.
    empty.mkdir()
    reset("nobody")
    assert empty.exists()


def test_a_size_of_the_journal_that_journald_does_not_take_is_refused() -> None:
    said = problems("base", **data("/var/lib/aura", {}, {}), journal_max="1 GB")
    assert "base_journal_max is 1 GB, which journald does not take" in said


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        ({"taken": [{"kind": "user", "name": "ubuntu", "number": 2500}]}, "already: user ubuntu 2500 (name"),
        ({"users": {"aura": {"uid": 998}}, "groups": {"aura": 997}}, "user aura 998; group aura 997 (name"),
        ({"users": {"aura": {"uid": 2500}}, "groups": {"aura": 2500}}, ""),
    ],
)
def test_nobody_else_is_the_service_user(seen: dict[str, Any], sentence: str) -> None:
    said = problems("base", data("/var/lib/aura", {}, {})["node"] | seen)
    assert sentence in said if sentence else said == ""
