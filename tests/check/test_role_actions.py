"""The actions that all roles are made of: unit, write_files, preflight and its table."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

RUNS = {
    "exists": True, "active": True, "enabled": True, "enabled_state": "enabled", "reload": False, "stale": False,
    "started": 100.0,
}  # fmt: skip

BARE = {"exists": False, "active": False, "enabled": False, "enabled_state": ""}


@pytest.mark.parametrize(
    ("asked", "unit", "read", "todo"),
    [
        ({}, {}, [], []),
        ({}, {"active": False}, [], ["daemon-reload", "start"]),
        ({}, {"enabled": False, "enabled_state": "disabled"}, [], ["daemon-reload", "enable"]),
        ({}, {"enabled": False, "enabled_state": "static"}, [], []),
        # On a bare node, in a check too.
        ({}, BARE, [], ["daemon-reload", "enable", "start"]),
        # What a run that failed has left: a newer file of the unit, or one that it reads.
        ({}, {"reload": True, "stale": True}, [], ["daemon-reload", "restart"]),
        ({}, {"reload": True}, [], ["daemon-reload"]),
        ({}, {}, [99.0, 150.0], ["daemon-reload", "restart"]),
        ({"renew": False}, {"stale": True}, [150.0], []),
        ({}, {}, [201.0], []),  # a time to come
        ({}, {"active": False}, [150.0], ["daemon-reload", "start"]),
        ({}, {"enabled_state": "masked", "active": False}, [], ["daemon-reload", "unmask", "start"]),
        ({"state": "masked"}, {}, [], ["stop", "mask"]),
        ({"state": "masked"}, {"enabled_state": "masked", "active": False}, [], []),
        ({"state": "stopped", "enabled": False}, BARE, [], []),
        ({"state": "stopped"}, BARE, [], ["daemon-reload", "enable"]),  # for the next boot
        ({"state": "stopped", "enabled": False}, {}, [], ["daemon-reload", "disable", "stop"]),
        ({"state": "stopped", "enabled": False}, {**BARE, "exists": True, "enabled_state": "disabled"}, [], []),
    ],
)  # fmt: skip
def test_a_unit_runs_with_the_files_that_lie_there(
    asked: dict[str, Any], unit: dict[str, Any], read: list[float], todo: list[str]
) -> None:
    steps = tree.plugin("action/unit").steps(asked, {**RUNS, **unit}, read, 200.0)
    assert steps == todo


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = tree.plugin("modules/write_files")
    monkeypatch.setattr(module, "ORIGINALS", str(tmp_path / "originals"))
    monkeypatch.setattr(module, "EDITED", str(tmp_path / "edited"))
    return module


def made(files: Any, entry: dict[str, Any]) -> bool:
    """Whether something differed; it does not afterwards."""
    me = {"owner": Path.home().owner(), "group": Path.home().group()}
    asked = files.wanted({**me, **entry})
    wanted = files.with_original(asked)
    differs = not files.same(wanted, files.now(asked["path"]))
    if differs:
        files.write(asked, wanted)
    files.forget(asked)
    assert files.same(wanted, files.now(asked["path"]))
    return differs


def test_files_become_what_they_shall_be(files: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep/er/file"
    entry = {"path": str(path), "content": "ñandú\n", "mode": "0640"}
    assert made(files, entry)
    assert path.read_text() == "ñandú\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert not made(files, entry)
    path.chmod(0o666)
    assert made(files, entry)
    assert list(path.parent.iterdir()) == [path]
    assert made(files, {"path": str(path), "link": "/etc/hostname"})
    assert path.is_symlink()
    # A file takes the place of a link, and not of what the link leads to.
    assert made(files, entry)
    assert not path.is_symlink()
    assert made(files, {"path": str(tmp_path / "folder/"), "directory": True, "mode": "0700"})
    assert made(files, {"path": str(path.parent), "absent": True})
    assert not path.parent.exists()
    with pytest.raises(ValueError, match="is a directory there"):
        made(files, {"path": str(tmp_path / "folder"), "content": ""})


def test_a_link_to_another_disk_is_not_replaced_by_an_empty_directory(files: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with pytest.raises(ValueError, match="is no directory there"):
        made(files, {"path": str(tmp_path / "link"), "directory": True})
    assert (tmp_path / "link").is_symlink()


def with_an_original(path: Path, content: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """How a file is asked for, and how it is taken away again."""
    asked = {"path": str(path), "original": True}
    return {**asked, "content": content}, {**asked, "absent": True}


def test_what_lay_there_before_comes_back(files: Any, tmp_path: Path) -> None:
    path = tmp_path / "chrony.conf"
    path.write_text("theirs\n")
    path.chmod(0o600)
    mine, gone = with_an_original(path, "ours\n")
    assert made(files, mine)
    assert made(files, {**mine, "content": "ours, newer\n"})
    assert made(files, gone)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("theirs\n", 0o600)
    assert Path(f"{tmp_path}/edited{path}").read_text() == "ours, newer\n"
    # Made again, and taken back again: what is there then is the original.
    path.write_text("theirs, too\n")
    assert made(files, mine)
    assert made(files, gone)
    assert path.read_text() == "theirs, too\n"
    # Where there was none, none comes back.
    new = tmp_path / "new.conf"
    assert made(files, {**mine, "path": str(new)})
    assert made(files, {**gone, "path": str(new)})
    assert not new.exists()


def test_a_file_that_we_have_never_written_stays(files: Any, tmp_path: Path) -> None:
    """A PC that its installer has called node0 already, a Docker that is switched off, a reset that is run twice."""
    path = tmp_path / "hostname"
    path.write_text("node0\n")
    path.chmod(0o644)
    mine, gone = with_an_original(path, "node0\n")
    assert not made(files, mine)
    assert not made(files, gone)
    assert path.read_text() == "node0\n"
    # What was right, and is another one since an upgrade.
    assert made(files, {**mine, "content": "first\n"})
    assert made(files, gone)
    assert not made(files, gone)
    assert path.read_text() == "node0\n"
    # There was none, and somebody else has deleted ours: what comes after the reset is theirs.
    new = tmp_path / "daemon.json"
    assert made(files, {**mine, "path": str(new)})
    new.unlink()
    assert not made(files, {**gone, "path": str(new)})
    new.write_text("theirs\n")
    assert not made(files, {**gone, "path": str(new)})
    assert new.read_text() == "theirs\n"


@pytest.mark.parametrize(
    "entry",
    [{"path": "relative", "content": ""}, {"path": "/a"}, {"path": "/a", "content": "", "link": "/b"},
     {"path": "/a", "content": "", "mod": "0644"}],
)  # fmt: skip
def test_an_entry_that_says_too_little_or_too_much_is_refused(files: Any, entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"/a|relative"):
        files.wanted(entry)


def test_what_has_just_been_seen_is_not_asked_again() -> None:
    same = tree.plugin("filter/as_it_shall_be").as_it_shall_be
    seen = {"kind": "file", "sha256": "", "mode": "0644", "owner": "root", "group": "root", "target": ""}
    text = {"path": "/a", "content": "x"}
    assert not same(text, seen)
    seen["sha256"] = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert same(text, seen)
    assert not same({**text, "mode": "0600"}, seen)
    assert not same({**text, "owner": "aura"}, seen)
    assert not same({"path": "/a", "absent": True}, seen)
    assert same({"path": "/a", "link": "/b"}, {**seen, "kind": "link", "target": "/b"})
    # Whether an original has to come back only the node knows.
    assert not same({"path": "/a", "absent": True, "original": True}, {**seen, "kind": "absent"})


def test_the_table_says_all_of_all_nodes_and_the_same_only_once() -> None:
    table = tree.plugin("filter/preflight_table").preflight_table
    assert table({"node0": [], "node1": []}) == ""
    ufw = {"role": "firewall", "sentence": "ufw is active there. " + "Switch it off (sudo ufw disable). " * 5}
    disk = {"role": "base", "sentence": "its disk is full."}
    said = table({"node0": [ufw], "node1": [ufw, disk], "node2": []})
    assert said.count("ufw is active there") == 1
    assert "node0, node1  firewall" in said
    assert "node1         base      its disk is full." in said
    assert all(len(line) <= 120 for line in said.splitlines())
    assert said.splitlines()[-1] == "To go on without node0 and node1: --limit 'cluster:!node0:!node1'"
    assert "--limit" not in table({"node0": [disk], "node1": [ufw]})


@pytest.mark.parametrize(
    ("name", "written", "value", "said"),
    [
        ("base_uid", "2600", 2600, ""),
        ("base_uid", "many", "many", "base_uid is 'many'; it has to be a whole number."),
        ("base_journal_max", 500, "500", ""),
        ("base_enabled", "false", False, ""),
        ("base_data_directory", "~/mine", "~/mine", ""),  # whose home it is only the node knows
        ("nvidia_driver_reboot", None, None, ""),
        ("firewall_lan_services", [5353], ["5353"], ""),
        ("firewall_admin_ports", ["22"], [22], ""),
        ("firewall_admin_ports", ["a"], ["a"], "is ['a']; it has to be a list (in brackets, or a line each), each a"),
        ("firewall_lan_services", "udp/5353", "udp/5353", "is 'udp/5353'; it has to be a list"),
        ("notify_services", "a://hush", "a://hush", "notify_services is another thing (not shown: a secret);"),
        ("notify_language", "fr", "fr", "notify_language is 'fr'; it has to be one of es, en."),
    ],
)  # fmt: skip
def test_a_setting_has_the_type_of_its_role_or_there_is_a_sentence(
    name: str, written: Any, value: Any, said: str
) -> None:
    converted = tree.plugin("action/preflight").converted
    found, sentence = converted(name, option(name), written, written)
    assert (found, type(found)) == (value, type(value))
    assert said in sentence and bool(said) == bool(sentence)


def test_what_is_left_empty_is_named_as_the_person_wrote_it() -> None:
    converted = tree.plugin("action/preflight").converted
    name = "base_data_directory"
    _, said = converted(name, option(name), None, "{{ data_directory }}")
    assert said == "base_data_directory (data_directory) is empty; it has to be a directory."


def option(name: str) -> dict[str, Any]:
    """What a role says of its variable."""
    role = max((role.name for role in tree.roles() if name.startswith(f"{role.name}_")), key=len)
    specs = yaml.safe_load((tree.ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())
    return dict(specs["argument_specs"]["main"]["options"][name])


def test_what_shall_be_absent_has_no_text() -> None:
    action = tree.plugin("action/write_files").ActionModule(*[None] * 6)
    entry = {"path": "/a", "content": "x", "template": "x.j2", "absent": True}
    assert action._filled(entry, {}) == {"path": "/a", "absent": True}


def sum_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **told: Any
) -> dict[str, Any]:
    """Of the module write_files; nothing is logged."""
    logged: list[str] = []
    monkeypatch.setattr(AnsibleModule, "log", lambda module, text, **more: logged.append(text))
    with patch_module_args(told), pytest.raises(SystemExit):
        tree.plugin("modules/write_files").main()
    assert logged == [], "a Wi-Fi's password stands in netplan's files"
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_directories_on_the_way_to_a_file_are_open_on_a_hardened_image_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep/er/file"
    me = {"owner": Path.home().owner(), "group": Path.home().group()}
    before = os.umask(0o027)
    try:
        said = answer(monkeypatch, capsys, files=[{"path": str(path), "content": "", **me}])
    finally:
        os.umask(before)
    assert said["paths"] == [str(path)], said
    assert [stat.S_IMODE(one.stat().st_mode) for one in path.parents[:2]] == [0o755, 0o755]
