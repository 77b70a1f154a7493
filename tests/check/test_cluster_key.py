"""The cluster's key may have a passphrase: then an agent has to say it, and where nobody has one yet it is offered."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree

KEY = tree.plugin("filter/cluster_key")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    process = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    yield
    process.terminate()
    process.wait(10)


def made(state: Path, passphrase: str) -> Path:
    key = state / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", key], check=True)
    return key


def test_a_key_without_a_passphrase_is_offered_one_where_the_controller_is_a_node(tmp_path: Path) -> None:
    assert KEY.cluster_key_problems(str(tmp_path)) == []
    key = made(tmp_path, "")
    assert KEY.cluster_key_problems(str(tmp_path)) == []
    assert KEY.passphrase_offer(str(tmp_path), []) == ""
    said = KEY.passphrase_offer(str(tmp_path), ["node0"])
    assert re.match(r"node0 is this machine, .*: ssh-keygen -p -f \S+id_ed25519, and ssh-add ", said)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "a secret", "-f", key], check=True)
    assert KEY.passphrase_offer(str(tmp_path), ["node0"]) == ""


@pytest.mark.usefixtures("agent")
def test_a_passphrase_is_said_by_an_agent_or_asked_for(tmp_path: Path) -> None:
    key = made(tmp_path, "a secret")
    (said,) = KEY.cluster_key_problems(str(tmp_path))
    assert "has a passphrase, and no ssh-agent here says it. Type: ssh-add" in said
    # As a person types it, without a terminal.
    answer = tmp_path / "answer"
    answer.write_text("#!/bin/sh\necho a secret\n")
    answer.chmod(0o755)
    words = ["env", "SSH_ASKPASS_REQUIRE=force", f"SSH_ASKPASS={answer}", "ssh-add", "-q", str(key)]
    subprocess.run(words, check=True, timeout=20)
    assert KEY.cluster_key_problems(str(tmp_path)) == []


def test_without_any_agent_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made(tmp_path, "a secret")
    assert len(KEY.cluster_key_problems(str(tmp_path))) == 1
