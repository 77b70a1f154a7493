"""Where the role sshd looks for keys, and what it says of a second one."""

from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest
import tree
from expressions import says

OWN, SECOND = "ssh-ed25519 AAAAC3own controller", "ssh-ed25519 AAAAC3second me@laptop"


def problem(keys: str, second: str) -> str:
    path = says("sshd", "__sshd_authorized_keys", sshd_user="ubuntu")
    seen = {"texts": {path: keys}}
    return says("sshd", "__sshd_problem", sshd_user="ubuntu", sshd_second_key=second, __sshd_seen=seen)


def test_what_is_said_of_a_second_key() -> None:
    assert problem(OWN, SECOND) == ""
    assert problem(OWN, "") == ""
    assert "is the one that the controller uses already" in problem(OWN, OWN)
    # No key found says nothing about the second one.
    assert problem("", SECOND).startswith("no key is in ~ubuntu/.ssh/authorized_keys")


def test_a_home_is_where_the_node_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/authorized_keys").write_text(OWN)
    # ubuntu's home is not below /home.
    monkeypatch.setattr(pwd, "getpwnam", lambda _: SimpleNamespace(pw_dir=str(tmp_path)))
    path = says("sshd", "__sshd_authorized_keys", sshd_user="ubuntu")
    found = tree.plugin("modules/node_state").texts([path, "/nowhere"])
    assert found == {path: OWN, "/nowhere": ""}
