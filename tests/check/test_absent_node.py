"""One node does not answer: the others are looked at and stopped all the same, and it is named."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in
from plays import played, plays_of, role_with

# As the real one it wants to be told a unit.
SYSTEMCTL = '#!/bin/sh\necho "$@" >>{place}/asked\ncase "$*" in *.service) ;; *) exit 1 ;; esac\n'
RANK_STATUS = """#!/bin/sh
cd {place}/said && echo "$*" >>../asked && set -- * && cat "$1" && [ $# = 1 ] || rm "$1"
"""
RANKS: dict[str, Any] = {
    "ranks": [{
        "rank": 0, "world_size": 2, "node": "node0", "run": "probe", "unit": {"ActiveState": "active"}, "trouble": "",
        "state": "training", "status": {"state": "training", "step": 7, "max_steps": 9, "away": [1]},
    }],
    "script": {},
}  # fmt: skip


def with_one_off(
    place: Path, plays: list[dict[str, Any]], *says: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    """The plays on node0 (this machine, with stand-ins for its tools), and on node1, which is off.

    says: what rank-status answers, one after the other; the last for ever.
    """
    (place / "said").mkdir()
    for number, answer in enumerate(says or [RANKS]):
        (place / f"said/{number:02}").write_text(json.dumps(answer))
    (place / "bin").mkdir()
    for name, text in {
        "systemctl": SYSTEMCTL.format(place=place),
        "journalctl": "#!/bin/sh\necho the last line\n",
        "rank-status": RANK_STATUS.format(place=place),
    }.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    for name in ("tasks", "templates"):
        (place / name).symlink_to(tree.ROOT / "playbooks" / name)
    roles = role_with(place, "trainer", {"/opt/aura/rank-status": f"{place}/bin/rank-status"})
    off = {"ansible_host": "127.0.0.1", "ansible_port": 9}
    hosts = {"node0": {"ansible_connection": "local"}, "node1": off}
    groups = {
        "cluster": {"hosts": hosts, "vars": {"ansible_become": False, "cluster_state": f"{place}/state"}}
    }
    path = f"{place}/bin:{os.environ['PATH']}"
    return played(place, plays, groups, ANSIBLE_ROLES_PATH=str(roles), PATH=path)


@pytest.mark.parametrize(
    ("playbook", "words"),
    [
        ("status", ["0/2   node0", "7/9", "Without rank 1: the others train on",
                    "node1 does not answer: nobody knows what its ranks do."]),
        ("logs", ["the last line", "node1 does not answer."]),
    ],
)  # fmt: skip
def test_who_looks_is_told_of_both(tmp_path: Path, playbook: str, words: list[str]) -> None:
    done = with_one_off(tmp_path, plays_of(playbook))
    assert done.returncode == 0, done.stdout
    for word in words:
        assert word in done.stdout


def table_of(*statuses: list[dict[str, Any]]) -> str:
    """What status.yml shows of nodes with these ranks."""
    node = {"trainer_answers": True, "script_status": {}}
    nodes = {f"node{number}": node | {"trainer_status": ranks} for number, ranks in enumerate(statuses)}
    template = (tree.ROOT / "playbooks/templates/status.j2").read_text()
    return str(filled_in(template, {"ansible_play_hosts": list(nodes), "hostvars": nodes}))


def test_who_was_not_there_at_the_end_of_a_run_is_named() -> None:
    def shown(*states: str, unit: str = "inactive") -> str:
        """unit: of a rank that is done; while it starts again it says so still."""
        statuses = []
        for number, state in enumerate(states):
            done = {"unit": {"ActiveState": unit}} if state == "done" else {}
            names = {"rank": number, "node": f"node{number}", "state": state}
            statuses.append([RANKS["ranks"][0] | names | done])
        return table_of(*statuses)

    assert "done, and node2 was not there" in shown("done", "done", "joining")
    assert "stop.yml --limit node1,node2" in shown("done", "joining", "joining")
    assert "was not there" not in shown("training", "joining") + shown("done", "done")
    assert "was not there" not in shown("done", "joining", unit="active")


@pytest.mark.parametrize(("unit", "is_over"), [("failed", True), ("activating", False)])
def test_of_who_has_ended_for_good_it_is_said_what_brings_it_back(unit: str, is_over: bool) -> None:
    first = RANKS["ranks"][0] | {"status": {"state": "saving", "message": "no room anywhere", "away": [1]}}
    gone = {"rank": 1, "node": "node1", "unit": {"ActiveState": unit}, "state": "failed"}
    second = first | gone | {"status": {"state": "failed", "message": "no card"}}
    shown = table_of([first, second])
    assert "no room anywhere" in shown and "no card" in shown
    assert "Without rank 1" in shown and is_over == ("playbooks/join.yml" in shown)


def test_a_stop_stops_those_that_answer_and_says_which_one_was_not_told(tmp_path: Path) -> None:
    done = with_one_off(tmp_path, plays_of("stop"))
    assert "disable --quiet --now aura-train@0.service" in (tmp_path / "asked").read_text()
    assert done.returncode != 0, done.stdout
    said = " ".join(done.stdout.split())
    assert "node1 does not answer: its ranks were not told to stop, and start again with it." in said
    assert "ansible-playbook playbooks/stop.yml --limit node1" in said
    assert "other nodes" not in said  # with --limit nobody has asked them; the table says who has stopped


SCRIPT = {
    "node": "node0", "run": "theirs", "launcher": "torchrun", "program": "train.py", "world_size": 2, "local_ranks": 1,
    "active": True, "unit": "active", "ranks": [],
}  # fmt: skip


@pytest.mark.parametrize("ranks", [[], RANKS["ranks"]])
def test_a_script_is_stopped_whether_or_not_a_run_was_there_before(
    tmp_path: Path, ranks: list[dict[str, Any]]
) -> None:
    done = with_one_off(tmp_path, plays_of("stop"), {"ranks": ranks, "script": SCRIPT})
    asked = (tmp_path / "asked").read_text()
    assert "stop aura-script.service\nreset-failed aura-script.service\n" in asked, done.stdout
    assert ("disable" in asked) is bool(ranks)


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    rank = RANKS["ranks"][0]
    ended = {"unit": {"ActiveState": "inactive"}, "state": "done", "status": rank["status"] | {"step": 9}}
    follow = {"ansible.builtin.include_tasks": "tasks/follow.yml", "vars": {"follow_of": "run"}}
    last = RANKS | {"ranks": [rank | ended]}
    done = with_one_off(tmp_path, [{"hosts": "cluster", "tasks": [follow]}], RANKS, RANKS, last)
    assert done.returncode == 0, done.stdout
    assert (done.stdout.count("7/9"), done.stdout.count("9/9")) == (2, 1)
    assert (tmp_path / "asked").read_text().splitlines() == ["--all --until end --timeout 20"] * 3
    assert done.stdout.count("node1 does not answer") == 3


def test_no_tasks_include_themselves() -> None:
    """After 245 rounds Python's recursion limit would end them."""
    folder = tree.ROOT / "playbooks/tasks"
    named = re.compile(r"_tasks:\s*(?:tasks/)?(\S+\.yml)")
    includes = {path.name: set(named.findall(path.read_text())) for path in folder.iterdir()}
    for name, below in includes.items():
        reached: set[str] = set()
        while below - reached:
            reached |= below
            below = set().union(*(includes.get(one, set()) for one in reached))
        assert name not in reached, f"playbooks/tasks/{name} includes itself"


@pytest.mark.parametrize(
    ("states", "active"),
    [("training joining", True), ("done training", True), ("done joining", False), ("done done", False)],
)
def test_who_is_waited_for(states: str, active: bool) -> None:
    """Who is done has an inactive unit; a node that does not answer counts for nothing."""
    still_active = tree.plugin("filter/process_group").still_active
    ended, runs = {"ActiveState": "inactive"}, {"ActiveState": "active"}
    ranks = [{"state": state, "unit": ended if state == "done" else runs} for state in states.split()]
    node: dict[str, Any] = {"trainer_answers": True, "trainer_status": ranks, "script_status": {}}
    off = node | {"trainer_answers": False, "trainer_status": RANKS["ranks"]}
    assert still_active([node, off]) is active
    assert still_active([node | {"script_status": SCRIPT}, off])
    assert not still_active([off])
