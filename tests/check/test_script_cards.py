"""Which cards and how many ranks a script gets on nodes with graphics cards: the role's tasks, on recorded nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tree
import yaml
from test_launch_cards import GTX1650, RTX3060, RTX3090, node, played


class Look:
    """roles/script/tasks/look.yml on these nodes, for this launcher."""

    def __init__(self, folder: Path, nodes: dict[str, dict[str, Any]], launcher: str) -> None:
        for recorded in (settings["recorded"] for settings in nodes.values()):
            recorded["texts"] = {"/opt/aura/wheelhouse.complete": "91bc"}
        tell = {
            "name": "Tell",
            "ansible.builtin.copy": {
                "dest": f"{folder}/{{{{ inventory_hostname }}}}.json", "content": "{{ __script_node | to_json }}",
            },
        }  # fmt: skip
        tasks = yaml.safe_load(Path(tree.ROOT, "roles/script/tasks/look.yml").read_text())
        play = {"hosts": "cluster", "gather_facts": False, "any_errors_fatal": True, "tasks": [*tasks, tell]}
        (folder / "play.yml").write_text(yaml.safe_dump([play]))
        common = {
            "ansible_connection": "local", "script_nodes": list(nodes), "script_address": "192.168.50.20",
            "script_cards": "free", "script_cpu": False, "script_processes": 0,
            "script_request": {"launcher": launcher, "compiles": False},
        }  # fmt: skip
        (folder / "hosts.json").write_text(json.dumps({"cluster": {"hosts": nodes, "vars": common}}))
        self.code, self.said = played(folder)
        told = [json.loads((folder / f"{name}.json").read_text()) for name in nodes if not self.code]
        self.cards = {one["name"]: one["cards"] for one in told}
        self.ranks = {one["name"]: one["ranks"] for one in told}


def unequal() -> dict[str, dict[str, Any]]:
    return {
        "node0": node("cu126", GTX1650, RTX3090, script_cards="all"),
        "node1": node("cu130", GTX1650, RTX3090),  # the GTX 1650 drives the display
        "node2": node("cpu"),
    }


def test_torchrun_gets_a_rank_per_card(tmp_path: Path) -> None:
    look = Look(tmp_path, unequal(), "torchrun")
    assert look.code == 0, look.said
    assert look.ranks == {"node0": 2, "node1": 1, "node2": 1}
    assert look.cards == {"node0": ["GPU-1a1b", "GPU-2a1b"], "node1": ["GPU-2a1b"], "node2": []}


def test_accelerate_is_not_started_on_unequal_nodes(tmp_path: Path) -> None:
    nodes = unequal()
    del nodes["node2"]
    look = Look(tmp_path, nodes, "accelerate")
    assert look.code != 0
    assert "these would have node0 2, node1 1. Nothing was started." in look.said
    nodes["node0"]["script_cards"] = "free"  # the way out that it names
    again = tmp_path / "again"
    again.mkdir()
    assert Look(again, nodes, "accelerate").ranks == {"node0": 1, "node1": 1}


def test_a_node_that_cannot_train_is_named(tmp_path: Path) -> None:
    nodes = {"node0": node("cu130", RTX3060), "node1": node("cpu", RTX3090)}
    look = Look(tmp_path, nodes, "torchrun")
    assert "node1 cannot run a script as it is: its torch is the build for processors" in look.said
    assert "--limit 'cluster:!node1'" in look.said
