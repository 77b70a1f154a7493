"""Where the role sshd looks for keys, what it says of a second one, and when it has something to do."""

from __future__ import annotations

import hashlib
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tree
from expressions import problems, says

OWN, SECOND = "ssh-ed25519 AAAAC3own controller", "ssh-ed25519 AAAAC3second me@laptop"
SSHD = tree.plugin("filter/sshd")


def problem(keys: str, second: str) -> str:
    user = "aura-admin"
    path = says("sshd", "__sshd_authorized_keys", sshd_user=user)
    return problems("sshd", {"texts": {path: keys}}, user=user, second_key=second)


def test_what_is_said_of_a_second_key(tmp_path: Path) -> None:
    (tmp_path / "second.pub").write_text(SECOND)
    assert problem(OWN, SECOND) == problem(OWN, str(tmp_path / "second.pub")) == problem(OWN, "") == ""
    assert problem(f"{OWN}\n{SECOND}", SECOND) == ""
    assert "is the one that the controller uses already" in problem(OWN, OWN)
    assert "is no public key" in problem(OWN, "ssh-ed25519 nonsense")
    assert "is no public key" in problem(OWN, "/nowhere.pub")
    # No key found says nothing about the second one.
    assert problem("", SECOND).startswith("no key is in ~aura-admin/.ssh/authorized_keys")
    assert "is the one" not in problem("", SECOND)


def test_what_other_files_of_sshd_say_is_seen() -> None:
    text = "# Ours.\nPort 2222\nMaxAuthTries 4\n"
    files = [{"path": "/a", "content": text, "mode": "0644"}, {"path": "/b", "content": "", "absent": True}]
    digest = hashlib.sha256(text.encode()).hexdigest()
    ours = {"kind": "file", "sha256": digest, "mode": "0644", "owner": "root", "group": "root"}
    seen: dict[str, Any] = {"files": {"/a": ours, "/b": {"kind": "absent"}}, "sshd": {"maxauthtries": ["4"]}}
    assert SSHD.sshd_difference(seen, files) == ""
    assert SSHD.sshd_difference({**seen, "sshd": {"maxauthtries": ["50"]}}, files) == (
        "sshd has MaxAuthTries 50, and shall have 4"
    )
    for path, there in (("/a", {"mode": "0600"}), ("/b", {"kind": "file"})):
        other = {**seen["files"], path: {**seen["files"][path], **there}}
        assert path in SSHD.sshd_difference({**seen, "files": other}, files)


def test_a_home_is_where_the_node_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/authorized_keys").write_text(OWN)
    # It is not below /home.
    monkeypatch.setattr(pwd, "getpwnam", lambda _: SimpleNamespace(pw_dir=str(tmp_path)))
    path = says("sshd", "__sshd_authorized_keys", sshd_user="aura-admin")
    found = tree.plugin("modules/node_state").texts([path, "/nowhere"])
    assert found == {path: OWN, "/nowhere": ""}
