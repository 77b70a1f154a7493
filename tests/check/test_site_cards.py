"""What site.yml knows of the cluster's cards before it changes anything: its own tasks, on recorded nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from plays import played, plays_of, told
from terminal import at_a_terminal
from test_driver_decision import seen
from test_wsl import BESIDE, inventory

STAND_IN = f"""
import runpy

from pathlib import Path

class ActionModule(runpy.run_path("{tree.ROOT}/plugins/action/node_state.py")["ActionModule"]):
    def _ask(self, look, variables):
        again = Path(__file__).parent / variables["inventory_hostname"]
        name = "recorded_later" if again.exists() and "recorded_later" in variables else "recorded"
        again.touch()
        return variables[name] | {{"missing": []}}
"""
SAY = "{{ inventory_hostname }} {{ cluster_torch }} {{ (nvidia_driver_decision | default({})).action | default('-') }}"


def recorded(
    place: Path, plays: list[dict[str, Any]], groups: dict[str, Any], *words: str, typed: Sequence[str] = ()
) -> tuple[int, str]:
    """The plays, on nodes of which a look sees what their variable `recorded` is, and from the second look on what
    `recorded_later` is, where they have it. typed: what somebody answers at the terminal."""
    (place / "action").mkdir()
    (place / "action/node_state.py").write_text(STAND_IN)
    actions = f"{place}/action:{tree.ROOT}/plugins/action"
    if typed:
        (place / "hosts.json").write_text(json.dumps(groups))
        (place / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
        command = ["ansible-playbook", "-i", str(place / "hosts.json"), str(place / "play.yml"), *words]
        return at_a_terminal(command, list(typed), ANSIBLE_ACTION_PLUGINS=actions)
    done = played(place, plays, groups, *words, ANSIBLE_ACTION_PLUGINS=actions)
    return done.returncode, " ".join(done.stdout.split())


def run(
    tmp_path: Path,
    *words: str,
    typed: Sequence[str] = (),
    later: dict[str, Any] | None = None,
    **nodes: dict[str, Any],
) -> tuple[int, str]:
    """The tasks of site.yml before its roles, with the driver's role alone. later: what nodes have become since the
    first look."""
    play = next(play for play in plays_of("site") if "pre_tasks" in play)
    tasks = [task for task in play["pre_tasks"] if "wsl" not in str(task) and "wheels" not in str(task)]
    for task in tasks:
        include = task.get("ansible.builtin.include_tasks", {})
        if "file" in include:
            if include["file"] == "tasks/preflight.yml":
                task["vars"] = {"preflight_roles": []}  # no role but the driver's is here
            include["file"] = str(tree.ROOT / "playbooks" / include["file"])
    shown = {"ansible.builtin.debug": {"msg": SAY}}
    roles = [{"role": "nvidia_driver", "when": "false"}]
    play = {**play, "pre_tasks": [*tasks, shown], "roles": roles, "tasks": [], "environment": {}}
    restarts = {"ansible.builtin.import_playbook": str(tree.ROOT / "playbooks/restarts.yml")}
    hosts = {name: {"recorded": of} for name, of in nodes.items()}
    for name, of in (later or {}).items():
        hosts[name]["recorded_later"] = of
    told = {"torch_backend": "auto", "training_cards": "free", "ansible_connection": "local"}
    return recorded(
        tmp_path, [play, restarts], {"cluster": {"hosts": hosts, "vars": told}}, *words, typed=typed
    )


START = {"passphrase": False, "live": False, "windows": "", "boot_entry": ""}


def node(card: str, machine: str) -> dict[str, Any]:
    record = seen(card, machine)
    return record | {"start": START | record["start"]}


def test_a_fresh_pc_with_a_card_stops_nobody(tmp_path: Path) -> None:
    """Nouveau has the card of node1; node2's is older, so all cards get torch for it; node0 has none."""
    code, said = run(
        tmp_path, node0=node("none", "server"), node1=node("rtx3060", "desktop_with_nouveau"),
        node2=node("gtx1060", "server"), node3=node("rtx3060", "ubuntu_580_nouveau"),
    )  # fmt: skip
    assert code == 0, said
    decided = "node0 cpu -", "node1 cu126 install", "node2 cu126 install", "node3 cu126 restart"
    assert [words for words in decided if words not in said] == [], said
    # Nobody is at a terminal to be asked.
    assert "node3 may not be restarted from here. Type on it: sudo reboot" in said


def with_unit(record: dict[str, Any], unit: str) -> dict[str, Any]:
    return record | {"units": record["units"] | {unit: {"active": True}}}


def test_a_run_that_was_started_while_somebody_thought_keeps_its_driver(tmp_path: Path) -> None:
    before = node("rtx3060", "server")
    later = {"node1": with_unit(before, "aura-train@0.service")}
    code, said = run(tmp_path, typed=["yes"], later=later, node0=before, node1=before)
    assert code != 0 and "May they be restarted at the end?" in said, said
    assert "node1: a run is active there, and its driver cannot be changed under it" in said, said
    assert "node0: a run is active" not in said and "Nothing has been changed on any node." in said
    assert "node0 cu" not in said, "it goes on"


def test_a_run_that_was_started_under_the_roles_before_keeps_its_driver(tmp_path: Path) -> None:
    before = node("rtx3060", "server")
    hosts = {"node0": {"recorded": before, "recorded_later": with_unit(before, "aura-train@0.service")}}
    always = {"tags": "always"}
    decide = {"name": "nvidia_driver", "tasks_from": "decide.yml", "apply": always}
    tasks = [
        {"node_state": {"roles": ["nvidia_driver"]}, **always},
        {"ansible.builtin.include_role": decide, **always},
        {"preflight": {"roles": ["nvidia_driver"]}, **always},
        {"ansible.builtin.import_role": {"name": "nvidia_driver"}},
    ]
    play = {"hosts": "cluster", "gather_facts": False, "tasks": tasks}
    groups = {"cluster": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    code, said = recorded(tmp_path, [play], groups, "--tags", "preflight")
    assert code != 0 and "node0: a run is active there" in said, said


def test_a_script_that_was_started_since_keeps_its_node_from_a_restart(tmp_path: Path) -> None:
    before = node("rtx3060", "ubuntu_580_nouveau")
    later = {"node0": with_unit(before, "aura-script.service")}
    code, said = run(tmp_path, "-e", "reboot=true", later=later, node0=before)
    assert code == 0, said
    assert "node0 runs a script, which would not go on. When it is through, type on it" in said, said


def test_all_that_stands_in_the_way_of_a_driver_is_said_before_anything_is_changed(tmp_path: Path) -> None:
    code, said = run(
        tmp_path, "-e", "reboot=true", node1=node("rtx3060", "cuda_repository"), node2=node("gtx560ti", "server"),
        node3=node("rtx3060", "live"), node4=node("rtx3060", "server"),
    )  # fmt: skip
    assert code != 0
    assert "another repository than Ubuntu's" in said, said
    assert "is a Kepler or older" in said
    assert "it runs a live system" in said
    assert "Nothing has been changed" in said
    assert "node4 cu" not in said


@pytest.mark.parametrize(
    ("told", "sentence"),
    [("cu126", "cu126 has no code for"), ("auto", "no build of torch fits the cards of all nodes")],
)
def test_cards_that_no_build_fits_together_are_refused(told: str, sentence: str, tmp_path: Path) -> None:
    old, new = node("gtx1060", "server"), node("rtx5090", "server")
    code, said = run(tmp_path, "-e", f"torch_backend={told}", node1=new, node2=old)
    assert code != 0
    assert "Nothing has been changed" in said
    assert sentence in said


def test_a_card_is_still_known_when_something_has_changed(tmp_path: Path) -> None:
    """What changes a node ends what was seen of it (fact node_looks); its first run changes much."""
    known = {"ansible_facts": {"node_looks": {}}, "site_torch": {"gpu": {"cards": [{}], "smi": []}}}
    asked = ["gpu_watch_enabled", "docker_cards"]
    found = told(inventory(tmp_path, BESIDE), "node2", *asked, known=json.dumps(known))
    assert found == dict.fromkeys(asked, True)


@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "something has changed"])
def test_a_role_in_whose_way_nothing_stands_is_not_asked_again_until_something_changes(
    changed: bool, tmp_path: Path
) -> None:
    """Seen here by a setting that has become wrong in between."""
    seen = {"files": {"/etc/systemd/system/aura-watch.service": {"kind": "absent"}}, "users": {}}
    roles = {"roles": ["gpu_watch", "tensorboard"]}
    tasks = [
        {"node_state": roles},
        {"preflight": roles, "register": "found"},
        {"ansible.builtin.assert": {"that": "found.problems == []"}},
        {"ansible.builtin.set_fact": {"gpu_watch_interval": "often"}},
        {"node_state": {"forget": True}, "when": changed},
        {"preflight": {"role": "gpu_watch"}, "register": "asked"},
        {"ansible.builtin.assert": {"that": "'files' in asked"}},
    ]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    known = {"recorded": seen, "gpu_watch_enabled": True, "gpu_watch_interval": 5}
    code, said = recorded(tmp_path, [play], {"all": {"hosts": {"localhost": known}}})
    assert ("gpu_watch_interval is 'often'" in said) is changed, said
    assert (code != 0) is changed, said
