"""What a rank's unit does before the trainer runs: it waits for the node's address, and longer when it often failed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest
import tree

TOOL = tree.ROOT / "roles/trainer/files/start-rank"
UNIT = (tree.ROOT / "roles/trainer/templates/aura-train@.service.j2").read_text().splitlines()
ECHO = 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $*"'
SHOW = ["sh", "-c", ECHO, "aura", "train", "--run-dir", "/a b"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AURA_ADDRESS": "127.0.0.1"}, "lo =lo train --run-dir /a b"),
        # Somebody has said which one, or the run was launched before there was an address in its variables.
        ({"AURA_ADDRESS": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eno2"}, "eno2 =eno2 train --run-dir /a b"),
        ({"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "=eno3"}, "eno1 =eno3 train --run-dir /a b"),
    ],
)  # fmt: skip
def test_the_card_is_the_one_that_has_the_address_now(environment: dict[str, str], said: str) -> None:
    variables = {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run([TOOL, *SHOW], capture_output=True, text=True, env=variables, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


def test_without_its_address_a_rank_waits_for_it(tmp_path: Path) -> None:
    """It does not fail: a cable that is out for a night costs no starts."""
    answer = "echo '2: eno1 inet 10.0.0.1/24'"
    (tmp_path / "ip").write_text(f"#!/bin/sh\n[ -e {tmp_path}/back ] && {answer} || true\n")
    (tmp_path / "ip").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AURA_ADDRESS": "10.0.0.1"}
    process = subprocess.Popen([TOOL, *SHOW], stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout
    sentence = "No network card of this node has the address 10.0.0.1: waiting for it.\n"
    assert process.stdout.readline() == sentence
    assert process.poll() is None
    (tmp_path / "back").touch()
    assert process.communicate(timeout=20)[0] == "eno1 =eno1 train --run-dir /a b\n"


@pytest.fixture(scope="module")
def start_rank() -> ModuleType:
    module = ModuleType("start_rank")
    text = TOOL.read_text().removesuffix("main()\n")
    exec(compile(text, TOOL, "exec"), module.__dict__)  # noqa: S102 - the tool itself, without its last line
    return module


def test_no_number_of_failures_ends_it_and_each_waits_longer_up_to_a_minute(
    start_rank: ModuleType, tmp_path: Path
) -> None:
    assert "StartLimitIntervalSec=0" in UNIT  # systemd starts it for ever
    assert "RuntimeDirectoryPreserve=restart" in UNIT  # and what is remembered lives as long as it does that
    now, pauses = time.monotonic(), []
    for _ in range(1000):
        pauses.append(start_rank.pause(tmp_path / "starts", now))
        now += 8 + pauses[-1]
    assert pauses[:8] == [0, 0, 0, 0, 0, 5, 10, 15]
    assert max(pauses) <= 60
    assert min(pauses[20:]) >= 30
    assert start_rank.pause(tmp_path / "starts", now + 601) == 0  # it has run for a while since


@pytest.mark.parametrize("content", ["", "12.5\n1x", "\0\0"])
def test_what_was_being_written_when_it_was_killed_keeps_no_rank_from_starting(
    content: str, start_rank: ModuleType, tmp_path: Path
) -> None:
    starts, now = tmp_path / "starts", time.monotonic()
    starts.write_text(content)
    assert start_rank.pause(starts, now) == 0
    assert [float(word) for word in starts.read_text().split()] == [now]


def test_what_cannot_be_remembered_keeps_no_rank_from_starting(
    start_rank: ModuleType, tmp_path: Path
) -> None:
    """There is no room, say."""
    (tmp_path / "starts").mkdir()
    assert start_rank.pause(tmp_path / "starts", time.monotonic()) == 0


def test_who_has_trained_for_a_while_starts_again_at_once(start_rank: ModuleType, tmp_path: Path) -> None:
    """A peer goes or comes every minute, and all others begin anew each time."""
    now = time.monotonic()
    assert [start_rank.pause(tmp_path / "starts", now + 60 * start) for start in range(20)] == [0] * 20
