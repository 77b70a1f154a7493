"""What the role time_sync says about a clock, near enough or not: its own task, without a node."""

import json
from pathlib import Path

import pytest
import tree
import yaml
from expressions import says
from plays import played, role_with

NEAR = {"set": False, "offset": "0.000012"}
FAR = {
    "set": False,
    "silent": False,
    "problem": "its clock is 3.000000 s from that of node0 (time_sync_limit: 0.1).",
}


@pytest.mark.parametrize(
    ("said", "code", "sentence"),
    [(NEAR, 0, "0.000012 s from the clock of node0"), (FAR, 1, FAR["problem"])],
    ids=["near", "far"],
)
def test_it_says_how_the_clock_is(tmp_path: Path, said: dict[str, object], code: int, sentence: str) -> None:
    task = yaml.safe_load((tree.ROOT / "roles/time_sync/tasks/settle.yml").read_text())[-1]
    known = {
        "__time_sync_unknown": False, "__time_sync_settled": {"rc": code, "stdout": json.dumps(said)},
        "time_sync_address": "node1", "time_sync_server": "node0",
    }  # fmt: skip
    play = {"hosts": "localhost", "gather_facts": False, "vars": known, "tasks": [task]}
    done = played(tmp_path, [play], {})
    assert sentence in " ".join(done.stdout.split())
    assert (done.returncode != 0) == (code != 0)


@pytest.mark.parametrize(
    ("others", "silent", "fails"),
    [(["node1"], True, False), (["node1"], False, True), (["node1", "node0"], True, True)],
    ids=["it is off and left out", "left out, and its clock is far", "silent, and it was just made ready"],
)
def test_a_server_that_was_left_out_and_is_off_stops_nobody(
    tmp_path: Path, others: list[str], silent: bool, fails: bool
) -> None:
    """The first node has no power, and `--limit` goes on without it."""
    roles = role_with(tmp_path, "time_sync", {})
    tasks = yaml.safe_load((roles / "time_sync/tasks/settle.yml").read_text())[-2:]
    variables = yaml.safe_load((roles / "time_sync/vars/main.yml").read_text())
    said = {"set": False, "silent": silent, "problem": "node0 does not say what time it is."}
    told = variables | {
        "time_sync_address": "{{ inventory_hostname }}", "time_sync_server": "node0",
        "ansible_connection": "local", "__time_sync_settled": {"rc": 1, "stdout": json.dumps(said)},
    }  # fmt: skip
    play = {"hosts": "cluster", "gather_facts": False, "vars": told, "tasks": tasks}
    groups = {"cluster": {"hosts": {"node0": told, "node1": told}}}
    done = played(tmp_path, [play], groups, "--limit", ",".join(others))
    words = " ".join(done.stdout.split())
    assert (done.returncode != 0) is fails, words
    assert ("It was left out (--limit), so this goes on" in words) is not fails


@pytest.mark.parametrize("runs", [True, False])
def test_a_reset_starts_no_chrony_that_is_not_there(runs: bool) -> None:
    """Linux under Windows has none, and a unit that does not exist cannot be enabled."""
    tasks = yaml.safe_load((tree.ROOT / "roles/time_sync/tasks/remove.yml").read_text())
    (task,) = (task for task in tasks if "unit" in task)
    seen = {"units": {task["unit"]["name"]: {"active": runs}}}
    assert says("time_sync", task["when"], __time_sync_chrony=seen) is runs
