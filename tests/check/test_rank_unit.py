"""What a rank's unit does before the trainer runs: it finds the network card that has the node's address today."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import pytest
import tree

UNIT = tree.ROOT / "roles/trainer/templates/aura-train@.service.j2"


def start(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run what ExecStart says, with a program in the trainer's place that shows its variables and arguments."""
    line = next(
        line for line in UNIT.read_text().replace("\\\n", " ").splitlines() if line.startswith("ExecStart=")
    )
    *words, program, command, arguments = shlex.split(line.partition("=")[2])
    assert (program, command, arguments) == (
        "${AURA_RELEASE}/venv/bin/aura",
        "train",
        "$AURA_TRAIN_ARGUMENTS",
    )
    # As systemd does it.
    filled = [
        re.sub(r"\$\$|\$\{(\w+)\}", lambda found: environment.get(found[1], "") if found[1] else "$", word)
        for word in words
    ]
    show = ["sh", "-c", 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $*"', "aura"]
    return subprocess.run(
        [*filled, *show, "train", "--run-dir", "/a b"], capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AURA_ADDRESS": "127.0.0.1"}, "lo =lo train --run-dir /a b"),
        # Somebody has said which one, or the run was launched before there was an address in its variables.
        ({"AURA_ADDRESS": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eno2"}, "eno2 =eno2 train --run-dir /a b"),
        (
            {"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "=eno3"},
            "eno1 =eno3 train --run-dir /a b",
        ),
    ],
)
def test_the_card_is_the_one_that_has_the_address_now(environment: dict[str, str], said: str) -> None:
    done = start(environment)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


def test_without_its_address_a_rank_does_not_start() -> None:
    done = start({"AURA_ADDRESS": "192.0.2.77"})
    assert done.returncode == 1
    assert "No network card of this node has the address 192.0.2.77." in done.stderr


def test_the_variables_of_a_rank_name_no_card() -> None:
    """They are written at the launch, and the run may outlive the name."""
    variables = (tree.ROOT / "roles/trainer/templates/rank.env.j2").read_text()
    names = [line.partition("=")[0] for line in variables.splitlines()]
    assert "AURA_ADDRESS" in names
    assert not [name for name in names if name.endswith("_SOCKET_IFNAME")]
