"""One node does not answer: the others are looked at and stopped all the same, and it is named."""

from typing import Any

import pytest
import tree
from expressions import filled_in

RANKS: dict[str, Any] = {
    "ranks": [{
        "rank": 0, "world_size": 2, "node": "node0", "run": "probe", "unit": {"ActiveState": "active"}, "trouble": "",
        "state": "training", "status": {"state": "training", "step": 7, "max_steps": 9, "away": [1]},
    }],
    "script": {},
}  # fmt: skip


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


SCRIPT = {
    "node": "node0", "run": "theirs", "launcher": "torchrun", "program": "train.py", "world_size": 2, "local_ranks": 1,
    "active": True, "unit": "active", "ranks": [],
}  # fmt: skip


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
