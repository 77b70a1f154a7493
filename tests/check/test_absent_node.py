"""One node does not answer: the others are looked at and stopped all the same, and it is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import filled_in

# As the real one it wants to be told a unit.
SYSTEMCTL = '#!/bin/sh\necho "$@" >>{place}/asked\ncase "$*" in *.service) ;; *) exit 1 ;; esac\n'
RANKS: dict[str, Any] = {
    "ranks": [{
        "rank": 0, "world_size": 2, "node": "node0", "run": "probe", "unit": {"ActiveState": "active"}, "trouble": "",
        "state": "training", "status": {"state": "training", "step": 7, "max_steps": 9, "away": [1]},
    }],
    "script": {},
}  # fmt: skip


def played(place: Path, playbook: str, says: dict[str, Any] = RANKS) -> subprocess.CompletedProcess[str]:
    """The tasks of a playbook on node0 (this machine, with stand-ins for its tools), and on node1, which is off.

    says: what rank-status answers.
    """
    (place / "bin").mkdir()
    for name, text in {
        "systemctl": SYSTEMCTL.format(place=place),
        "journalctl": "#!/bin/sh\necho the last line\n",
        "rank-status": f"#!/bin/sh\necho '{json.dumps(says)}'\n",
    }.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    for name in ("tasks", "templates"):
        (place / name).symlink_to(tree.ROOT / "playbooks" / name)
    roles = place / "roles"
    roles.mkdir()
    for name in ("tasks", "meta", "defaults", "vars"):
        (roles / "trainer" / name).mkdir(parents=True)
        for path in (tree.ROOT / "roles/trainer" / name).glob("*.yml"):
            text = path.read_text().replace("/opt/aura/rank-status", f"{place}/bin/rank-status")
            (roles / "trainer" / name / path.name).write_text(text)
    plays: list[dict[str, Any]] = yaml.safe_load((tree.ROOT / f"playbooks/{playbook}").read_text())
    (place / "play.yml").write_text(yaml.safe_dump([play for play in plays if "hosts" in play]))
    off = {"ansible_host": "127.0.0.1", "ansible_port": 9}
    hosts = {"node0": {"ansible_connection": "local"}, "node1": off}
    (place / "hosts.json").write_text(
        json.dumps({"cluster": {"hosts": hosts, "vars": {"ansible_become": False}}})
    )
    return subprocess.run(
        ["ansible-playbook", "-i", str(place / "hosts.json"), str(place / "play.yml")], cwd=tree.ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=120, check=False,
        env=os.environ | {
            "ANSIBLE_ROLES_PATH": str(roles), "PATH": f"{place}/bin:{os.environ['PATH']}", "NO_COLOR": "1",
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("playbook", "words"),
    [
        (
            "status.yml",
            [
                *("0/2   node0", "7/9", "Without rank 1: the others train on"),
                "node1 does not answer: nobody knows what its ranks do.",
            ],
        ),
        ("logs.yml", ["the last line", "node1 does not answer."]),
    ],
)
def test_who_looks_is_told_of_both(tmp_path: Path, playbook: str, words: list[str]) -> None:
    done = played(tmp_path, playbook)
    assert done.returncode == 0, done.stdout
    for word in words:
        assert word in done.stdout


def test_who_was_not_there_at_the_end_of_a_run_is_named() -> None:
    template = (tree.ROOT / "playbooks/templates/status.j2").read_text()

    def shown(*states: str, unit: str = "inactive") -> Any:
        """unit: of a rank that is done; while it starts again it says so still."""
        nodes = {
            f"node{number}": {
                "trainer_answers": True,
                "script_status": {},
                "trainer_status": [
                    RANKS["ranks"][0]
                    | {"rank": number, "node": f"node{number}", "state": state}
                    | ({"unit": {"ActiveState": unit}} if state == "done" else {})
                ],
            }
            for number, state in enumerate(states)
        }
        return filled_in(template, {"ansible_play_hosts": list(nodes), "hostvars": nodes})

    assert "done, and node2 was not there" in shown("done", "done", "joining")
    assert "stop.yml --limit node1,node2" in shown("done", "joining", "joining")
    assert "was not there" not in shown("training", "joining") + shown("done", "done")
    assert "was not there" not in shown("done", "joining", unit="active")


def test_a_stop_stops_those_that_answer_and_says_which_one_was_not_told(tmp_path: Path) -> None:
    done = played(tmp_path, "stop.yml")
    assert "disable --quiet --now aura-train@0.service" in (tmp_path / "asked").read_text()
    assert done.returncode != 0, done.stdout
    said = " ".join(done.stdout.split())
    assert "node1 does not answer: its ranks were not told to stop, and start again with it." in said
    assert "ansible-playbook playbooks/stop.yml --limit node1" in said


SCRIPT = {
    "node": "node0", "run": "theirs", "launcher": "torchrun", "program": "train.py", "world_size": 2, "local_ranks": 1,
    "active": True, "unit": "active", "unit_failed": False, "ranks": [],
}  # fmt: skip


@pytest.mark.parametrize("ranks", [[], RANKS["ranks"]])
def test_a_script_is_stopped_whether_or_not_a_run_was_there_before(
    tmp_path: Path, ranks: list[dict[str, Any]]
) -> None:
    done = played(tmp_path, "stop.yml", {"ranks": ranks, "script": SCRIPT})
    asked = (tmp_path / "asked").read_text()
    assert "stop aura-script.service\nreset-failed aura-script.service\n" in asked, done.stdout
    assert ("disable" in asked) is bool(ranks)
