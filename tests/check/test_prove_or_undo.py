"""What the controller waits for, and where, when a change is not proved: the role's own tasks, with a node that answers
as it is told."""

import json
from pathlib import Path
from typing import Any

import tree
import yaml
from expressions import problems
from plays import played

ROLE = tree.ROOT / "roles/safe_change"
# Answers to the program's words; keeps where it was asked, and how long it might have waited.
STAND_IN = """
import json
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        word = self._task.args["commands"][-1][1]
        port = task_vars.get("ansible_port")
        at = f"{task_vars['ansible_host']}:{port}" if port else task_vars["ansible_host"]
        asked = {"word": word, "at": at, "seconds": int(self._task.args["seconds"])}
        with open(task_vars["log"], "a") as file:
            print(json.dumps(asked), file=file)
        said = task_vars["answers"].get(word)
        return {"changed": False, "failed": said is None, "reached": said is not None, "said": said or ""}
"""


def prove(
    folder: Path, answers: dict[str, str], other: dict[str, str] | None = None, **variables: Any
) -> tuple[str, list[dict[str, Any]]]:
    """What was said, and what the node was asked. answers: by the program's word; who is not there does not answer.
    other: those of a second node."""
    (folder / "action").mkdir()
    (folder / "action/new_connection.py").write_text(STAND_IN)
    play = {
        "hosts": "all", "gather_facts": False, "any_errors_fatal": True, "vars_files": [str(ROLE / "vars/main.yml")],
        "tasks": [{"ansible.builtin.import_tasks": str(ROLE / "tasks/prove_or_undo.yml")}],
    }  # fmt: skip
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    known = defaults | {
        "ansible_connection": "local", "ansible_host": "192.168.50.131", "answers": answers, "log": str(folder / "log"),
        "safe_change_of": "network", "safe_change_seconds": 90, "safe_change_address": "192.168.50.21",
        "__safe_change_begun": {"id": "1"},
    }  # fmt: skip
    nodes = {"node1": known | variables}
    if other is not None:
        nodes["node2"] = known | {"answers": other, "log": str(folder / "log2")}
    done = played(folder, [play], {"all": {"hosts": nodes}}, ANSIBLE_ACTION_PLUGINS=str(folder / "action"))
    assert done.returncode != 0, done.stdout
    asked = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return " ".join(done.stdout.split()), asked


def test_sshd_is_waited_for_at_its_old_port_whatever_its_proof_has_seen_since(tmp_path: Path) -> None:
    """Over the new port it says another one of itself, and nothing would have to move any more."""
    moves = "{{ 0 if __safe_change_port_before is defined else 2222 }}"
    told: dict[str, Any] = {"safe_change_of": "sshd", "safe_change_address": "", "safe_change_port": moves}
    _, asked = prove(tmp_path, {}, ansible_port=22, **told)
    assert [one["at"].rpartition(":")[2] for one in asked] == ["2222", "22"]


def test_a_node_that_was_never_reached_is_waited_for_at_the_old_address(tmp_path: Path) -> None:
    said, asked = prove(tmp_path, {})
    assert asked == [
        {"word": "reached", "at": "192.168.50.21", "seconds": 90},
        {"word": "ended", "at": "192.168.50.131", "seconds": 120},
    ]
    assert "takes the old ones back by itself, 90 s after they were changed" in said


def test_a_node_that_was_reached_and_lost_is_given_its_time(tmp_path: Path) -> None:
    """It waits 2 · 90 + 30 s for the proof (the program's `reached`); nobody goes to the power switch before that."""
    said, asked = prove(tmp_path, {"reached": "{}"})
    assert asked[-1] == {"word": "ended", "at": "192.168.50.131", "seconds": 240}
    assert "takes the old ones back by itself, 210 s after it was reached with the new ones" in said


def test_a_node_found_at_an_address_that_was_only_lent_is_waited_for_elsewhere(tmp_path: Path) -> None:
    lent: dict[str, Any] = {"ansible_host": "192.168.50.21", "safe_change_address_before": "192.168.1.57"}
    _, asked = prove(tmp_path, {"reached": "{}"}, **lent)
    assert [one["at"] for one in asked if one["word"] == "ended"] == ["192.168.1.57"]


def test_a_node_that_has_confirmed_stays_where_it_is_when_another_cannot(tmp_path: Path) -> None:
    said, asked = prove(tmp_path, {"reached": "{}", "confirm": '{"id": "1"}'}, other={"reached": "{}"})
    assert [one["word"] for one in asked] == ["reached", "confirm"]
    assert "node2 does not answer with the new settings" in said and "node1 does not answer" not in said


def test_who_finds_a_change_pending_does_not_take_it_for_what_shall_be() -> None:
    """An interrupted run, and the next one before the node has taken it back."""
    marker = "/var/lib/aura-safe-change/current/marker.json"
    assert problems("safe_change", {"texts": {marker: ""}}) == ""
    pending = json.dumps({"of": "firewall", "seconds": 60})
    said = problems("safe_change", {"texts": {marker: pending}})
    assert "new settings (firewall), and it takes the old ones back by itself within 150 s" in said
