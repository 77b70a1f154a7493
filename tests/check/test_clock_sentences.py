"""What the role time_sync says about a clock, near enough or not: its own task, without a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tree
import yaml
from expressions import says
from plays import played

NEAR = {"set": False, "offset": "0.000012"}
FAR = {"set": False, "problem": "its clock is 3.000000 s from that of node0 (time_sync_limit: 0.1)."}


@pytest.mark.parametrize(
    ("said", "code", "sentence"),
    [(NEAR, 0, "0.000012 s from the clock of node0"), (FAR, 1, FAR["problem"])],
    ids=["near", "far"],
)
def test_it_says_how_the_clock_is(tmp_path: Path, said: dict[str, object], code: int, sentence: str) -> None:
    task = yaml.safe_load((tree.ROOT / "roles/time_sync/tasks/settle.yml").read_text())[-1]
    known = {
        "__time_sync_settled": {"rc": code, "stdout": json.dumps(said)},
        "time_sync_address": "node1",
        "time_sync_server": "node0",
    }
    play = {"hosts": "localhost", "gather_facts": False, "vars": known, "tasks": [task]}
    done = played(tmp_path, [play], {})
    assert sentence in " ".join(done.stdout.split())
    assert (done.returncode != 0) == (code != 0)


@pytest.mark.parametrize("runs", [True, False])
def test_a_reset_starts_no_chrony_that_is_not_there(runs: bool) -> None:
    """Linux under Windows has none, and a unit that does not exist cannot be enabled."""
    tasks = yaml.safe_load((tree.ROOT / "roles/time_sync/tasks/remove.yml").read_text())
    (task,) = (task for task in tasks if "unit" in task)
    seen = {"units": {task["unit"]["name"]: {"active": runs}}}
    assert says("time_sync", task["when"], __time_sync_chrony=seen) is runs
