"""What site.yml finds out about the cluster's cards before it changes anything: its own tasks, on recorded nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from plays import plays_of
from plays import told as told_by
from recorded import run_plays, with_absolute_paths
from test_driver_decision import seen
from test_wsl import BESIDE, inventory

SAY = "{{ inventory_hostname }} {{ cluster_torch }} {{ nvidia_driver_decision.action }}"
SCRIPT, RANK = "aura-script.service", "aura-train@0.service"


def run(
    tmp_path: Path,
    *words: str,
    typed: Sequence[str] | None = None,
    later: dict[str, Any] | None = None,
    **nodes: dict[str, Any],
) -> tuple[int, str]:
    """The tasks of site.yml before its roles, and what it says of restarts at its end; the driver's role alone looks.

    later: what nodes have become since the first look.
    """
    play = next(play for play in plays_of("site") if "pre_tasks" in play)
    tasks = with_absolute_paths([task for task in play["pre_tasks"] if "set_clock" not in str(task)])
    for task in tasks:
        if "preflight_roles" in task.get("vars", {}):
            assert "nvidia_driver" in task["vars"]["preflight_roles"]
            task["vars"] = {"preflight_roles": ["nvidia_driver"]}
    shown = {"ansible.builtin.debug": {"msg": SAY}}
    play = {**play, "pre_tasks": [*tasks, shown], "tasks": []}
    restarts = plays_of("restarts")
    restarts[1]["tasks"] = [{"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} restarts now"}}]
    told = {"nvidia_driver_reboot": "ask", "torch_backend": "auto", "training_cards": "free"}
    hosts = {name: {"recorded": of, **told} for name, of in nodes.items()}
    for name, of in (later or {}).items():
        hosts[name]["recorded_later"] = of
    return run_plays(tmp_path, [play, *restarts], hosts, *words, typed=typed)


def node(card: str, machine: str, **more: Any) -> dict[str, Any]:
    return seen(card, machine) | more


def test_a_fresh_pc_with_a_card_stops_nobody(tmp_path: Path) -> None:
    """Nouveau has the card of node1; node2's is older, so all cards get torch for it; node0 has none."""
    code, said = run(
        tmp_path, node0=node("none", "server"), node1=node("rtx3060", "desktop_with_nouveau"),
        node2=node("gtx1060", "server"), node3=node("rtx3060", "ubuntu_580_nouveau"),
    )  # fmt: skip
    assert code == 0, said
    decided = "node0 cpu none", "node1 cu126 install", "node2 cu126 install", "node3 cu126 restart"
    assert [words for words in decided if words not in said] == [], said
    # Nobody is at a terminal to be asked.
    assert "node3 may not be restarted from here. Type on it: sudo reboot" in said


def test_a_run_that_was_started_while_somebody_thought_keeps_its_driver(tmp_path: Path) -> None:
    before = node("rtx3060", "server")
    later = {"node1": before | {"runs": [RANK]}}
    code, said = run(tmp_path, typed=["yes"], later=later, node0=before, node1=before)
    assert code != 0 and "May they be restarted at the end?" in said, said
    assert "node1: a run is active there, and its driver cannot be changed under it" in said, said
    assert "node0: a run is active" not in said and "Nothing has been changed on any node." in said
    assert "node0 cu" not in said, "it goes on"


def test_a_run_that_was_started_under_the_roles_before_keeps_its_driver(tmp_path: Path) -> None:
    before = node("rtx3060", "server")
    hosts = {"node0": {"recorded": before, "recorded_later": before | {"runs": [RANK]}}}
    always = {"tags": "always"}
    decide = {"name": "nvidia_driver", "tasks_from": "decide", "apply": always}
    tasks = [
        {"ansible.builtin.include_role": decide, **always},
        {"ansible.builtin.import_role": {"name": "nvidia_driver"}},
    ]
    code, said = run_plays(tmp_path, [{"hosts": "cluster", "tasks": tasks}], hosts, "--tags", "preflight")
    assert code != 0 and "node0: a run is active there" in said, said


def test_a_script_that_was_started_since_keeps_its_node_from_a_restart(tmp_path: Path) -> None:
    before = node("rtx3060", "ubuntu_580_nouveau")
    code, said = run(
        tmp_path, "-e", "reboot=true", later={"node0": before | {"runs": [SCRIPT]}}, node0=before
    )
    assert code == 0, said
    assert "node0 runs a script, which would not go on. When it is through, type on it" in said, said
    assert "restarts now" not in said


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
    ("backend", "sentence"),
    [("cu126", "cu126 has no code for"), ("auto", "no build of torch fits the cards of all nodes")],
)
def test_cards_that_no_build_fits_together_are_refused(backend: str, sentence: str, tmp_path: Path) -> None:
    old, new = node("gtx1060", "server"), node("rtx5090", "server")
    code, said = run(tmp_path, "-e", f"torch_backend={backend}", node1=new, node2=old)
    assert code != 0
    assert "Nothing has been changed" in said
    assert sentence in said


def test_with_limit_the_build_is_asked_of_the_release_that_is_there(tmp_path: Path) -> None:
    """Here there is none, and the newest build fits."""
    code, said = run(
        tmp_path,
        "--limit",
        "node1",
        node0=node("gtx1060", "dkms"),
        node1=node("rtx3060", "ubuntu_580_server"),
    )
    assert code == 0 and "node1 cu130 none" in said, said


def test_what_comes_with_a_card_follows_from_the_facts(tmp_path: Path) -> None:
    folder = inventory(tmp_path, BESIDE)
    asked = ["gpu_watch_enabled", "docker_cards"]
    for count in (0, 1):
        known = f'{{"ansible_facts": {{"gpu": {{"cards": {json.dumps([0] * count)}, "smi": []}}}}}}'
        assert told_by(folder, "node2", *asked, known=known) == dict.fromkeys(asked, count > 0)
    assert told_by(folder, "node2", *asked) == dict.fromkeys(asked, False)
