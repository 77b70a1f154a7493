"""What the role time_sync says about a clock, near enough or not: its own task, without a node."""

import json
from pathlib import Path

import pytest
import tree
import yaml
from expressions import says
from plays import played, role_with

NEAR = {"set": False, "offset": "0.000012"}
FAR = {"set": False, "silent": False, "problem": "its clock is 3.000000 s from that of node0."}
OFF = {"set": False, "silent": True, "problem": "node0 does not say what time it is."}
LEFT_OUT = "It was left out (--limit), so this goes on"


@pytest.mark.parametrize(
    ("others", "said", "fails", "sentence"),
    [
        pytest.param(["node1"], NEAR, False, "0.000012 s from the clock of node0", id="near"),
        pytest.param(["node1"], OFF, False, LEFT_OUT, id="it is off and left out"),
        pytest.param(["node1"], FAR, True, FAR["problem"], id="left out, and its clock is far"),
        pytest.param(["node1", "node0"], OFF, True, OFF["problem"], id="silent, and it was just made ready"),
    ],
)
def test_it_says_how_the_clock_is_and_a_server_that_was_left_out_stops_nobody(
    tmp_path: Path, others: list[str], said: dict[str, object], fails: bool, sentence: str
) -> None:
    """The first node has no power, and `--limit` goes on without it."""
    roles = role_with(tmp_path, "time_sync", {})
    tasks = yaml.safe_load((roles / "time_sync/tasks/settle.yml").read_text())[-2:]
    variables = yaml.safe_load((roles / "time_sync/vars/main.yml").read_text())
    told = variables | {
        "time_sync_address": "{{ inventory_hostname }}", "time_sync_server": "node0", "ansible_connection": "local",
        "__time_sync_settled": {"rc": int("problem" in said), "stdout": json.dumps(said)},
    }  # fmt: skip
    play = {"hosts": "cluster", "gather_facts": False, "vars": told, "tasks": tasks}
    groups = {"cluster": {"hosts": {"node0": told, "node1": told}}}
    done = played(tmp_path, [play], groups, "--limit", ",".join(others))
    words = " ".join(done.stdout.split())
    assert (done.returncode != 0) is fails, words
    assert sentence in words
    assert (LEFT_OUT in words) is (sentence == LEFT_OUT)


@pytest.mark.parametrize("runs", [True, False])
def test_a_reset_starts_no_chrony_that_is_not_there(runs: bool) -> None:
    """Linux under Windows has none, and a unit that does not exist cannot be enabled."""
    tasks = yaml.safe_load((tree.ROOT / "roles/time_sync/tasks/remove.yml").read_text())
    (task,) = (task for task in tasks if "unit" in task)
    seen = {"units": {task["unit"]["name"]: {"active": runs}}}
    assert says("time_sync", task["when"], __time_sync_chrony=seen) is runs
