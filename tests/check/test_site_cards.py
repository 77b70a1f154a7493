"""What site.yml finds out about the cluster's cards before it changes anything: its own tasks, on recorded nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plays import plays_of
from plays import told as told_by
from recorded import run_plays, with_absolute_paths
from test_driver_decision import prebuilt, seen
from test_wsl import BESIDE, inventory

SAY = "{{ inventory_hostname }} {{ cluster_torch }} {{ nvidia_driver_decision.action }}"


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


def test_a_fresh_pc_with_a_card_stops_nobody(tmp_path: Path) -> None:
    """Nouveau has the card of node1; node2's is older, so all cards get torch for it; node0 has none."""
    code, said = run(
        tmp_path, node0=seen(), node1=seen("RTX 3060", nouveau=True), node2=seen("GTX 1060"),
        node3=seen("RTX 3060", packages=prebuilt(), nouveau=True),
    )  # fmt: skip
    assert code == 0, said
    decided = "node0 cpu none", "node1 cu126 install", "node2 cu126 install", "node3 cu126 restart"
    assert [words for words in decided if words not in said] == [], said
    # Nobody is at a terminal to be asked.
    assert "node3 may not be restarted from here. Type on it: sudo reboot" in said


def test_a_run_that_was_started_while_somebody_thought_keeps_its_driver(tmp_path: Path) -> None:
    before = seen("RTX 3060")
    later = {"node1": before | {"runs": ["aura-train@0.service"]}}
    code, said = run(tmp_path, typed=["yes"], later=later, node0=before, node1=before)
    assert code != 0 and "May they be restarted at the end?" in said, said
    assert "node1: a run is active there, and its driver cannot be changed under it" in said, said
    assert "node0: a run is active" not in said and "Nothing has been changed on any node." in said
    assert "node0 cu" not in said, "it goes on"


def test_cards_that_no_build_fits_together_are_refused(tmp_path: Path) -> None:
    code, said = run(tmp_path, node1=seen("GTX 1060"), node2=seen("RTX 5090"))
    assert code != 0 and "Nothing has been changed" in said
    assert "no build of torch fits the cards of all nodes (node1: cu126; node2: cu130 or cu132)" in said


def test_what_comes_with_a_card_follows_from_the_facts(tmp_path: Path) -> None:
    folder = inventory(tmp_path, BESIDE)
    asked = ["gpu_watch_enabled", "docker_cards"]
    for count in (0, 1):
        known = f'{{"ansible_facts": {{"gpu": {{"cards": {json.dumps([0] * count)}, "smi": []}}}}}}'
        assert told_by(folder, "node2", *asked, known=known) == dict.fromkeys(asked, count > 0)
    assert told_by(folder, "node2", *asked) == dict.fromkeys(asked, False)
