"""What a launch makes of nodes with graphics cards: the role's own tasks up to the ranks, on recorded nodes.

No machine that runs these tests has a card. The recorded nodes are synthetic, in the shape that node_state gives.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import tree
import yaml

LAUNCH = Path(tree.ROOT, "roles/trainer/tasks/launch.yml")
LAST = "The world size follows"  # what comes after it changes the node
STAND_IN = """
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        return {"changed": False, **task_vars["recorded"]}
"""


def card(number: int, name: str, capability: str, display: bool = False) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{number}a1b", "name": name, "pci": f"0000:0{number}:00.0", "compute_capability": capability,
        "display_active": display,
    }  # fmt: skip


def node(build: str, *smi: dict[str, Any], silent: str = "", **settings: Any) -> dict[str, Any]:
    """A node with the trainer 3f2a in this build; `silent`: the number of one more card that no driver knows."""
    cards = [{"pci": known["pci"], "device_id": "10de:2504"} for known in smi]
    cards += [{"pci": "0000:05:00.0", "device_id": f"10de:{silent}"}] if silent else []
    recorded = {
        "gpu": {"cards": cards, "driver": "580.95.05" if smi else "", "smi": list(smi), "elsewhere": ""},
        "files": {"/opt/aura/current": {"target": f"releases/3f2a-{build}-91bc"}},
        "cards": [{"name": "eno1", "addresses": ["192.168.50.20/24"]}],
    }
    return {"recorded": recorded, **settings}


RTX3060, RTX3090, GTX1650 = (
    card(1, "RTX 3060", "8.6", display=True),
    card(2, "RTX 3090", "8.6"),
    card(1, "GTX 1650", "7.5", display=True),
)


def played(folder: Path) -> tuple[int, str]:
    """The exit code and the words of folder/play.yml, on folder/hosts.json as it was recorded."""
    (folder / "action").mkdir()
    (folder / "action/node_state.py").write_text(STAND_IN)
    done = subprocess.run(
        ["ansible-playbook", "-i", str(folder / "hosts.json"), str(folder / "play.yml")], cwd=tree.ROOT,
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
        check=False, env=os.environ | {"ANSIBLE_ACTION_PLUGINS": str(folder / "action"), "NO_COLOR": "1"},
    )  # fmt: skip
    return done.returncode, " ".join(done.stdout.split())


class Launch:
    """The tasks of one launch on these nodes."""

    def __init__(self, folder: Path, nodes: dict[str, dict[str, Any]]) -> None:
        tasks = yaml.safe_load(LAUNCH.read_text())
        last = [task["name"] for task in tasks].index(LAST)
        wanted = ["__trainer_first_rank", "__trainer_local_ranks", "__trainer_world_size"]
        tell = {
            "ansible.builtin.copy": {
                "dest": f"{folder}/{{{{ inventory_hostname }}}}.json",
                "content": f"{{{{ {{'env': env, 'facts': {wanted} | map('extract', vars)}} | to_json }}}}",
            },
            "name": "Tell",
            "vars": {
                "env": f"{{{{ lookup('template', '{tree.ROOT}/roles/trainer/templates/rank.env.j2') }}}}",
                "__trainer_local_rank": 0, "__trainer_arguments": [],
            },
        }  # fmt: skip
        (folder / "no_run.yml").write_text("[]")
        (folder / "tasks.yml").write_text(yaml.safe_dump([*tasks[: last + 1], tell]))
        play = {
            "hosts": "cluster", "gather_facts": False, "any_errors_fatal": True,
            "tasks": [{"ansible.builtin.import_tasks": "tasks.yml"}],
        }  # fmt: skip
        (folder / "play.yml").write_text(yaml.safe_dump([play]))
        common = {
            "ansible_connection": "local", "trainer_nodes": list(nodes), "trainer_address": "192.168.50.20",
            "trainer_run": "probe", "trainer_master_address": "192.168.50.20", "trainer_master_port": 12355,
            "trainer_threads": 0, "trainer_link_mbit": 1000, "trainer_cards": "free", "trainer_cpu": False,
            "trainer_runtime": "process",
        }  # fmt: skip
        inventory = {"cluster": {"hosts": nodes, "vars": common}}
        (folder / "hosts.json").write_text(json.dumps(inventory))
        self.code, self.said = played(folder)
        self.told = {
            name: json.loads((folder / f"{name}.json").read_text()) for name in nodes if not self.code
        }

    def ranks(self) -> dict[str, list[int]]:
        """First rank, ranks of the node, world size."""
        return {name: [int(number) for number in told["facts"]] for name, told in self.told.items()}

    def visible(self, name: str) -> str:
        lines = dict(line.split("=", 1) for line in self.told[name]["env"].splitlines() if "=" in line)
        return lines["CUDA_VISIBLE_DEVICES"]


def test_every_card_gets_a_rank_and_the_displays_is_left_out(tmp_path: Path) -> None:
    nodes = {
        "node0": node("cu130", RTX3060, silent="128b"),  # a GT 710 beside it, for the monitor
        "node1": node("cu130", GTX1650, RTX3090),
        "node2": node("cu126", GTX1650, RTX3090, trainer_cards="all"),
        "node3": node("cpu"),
    }
    launch = Launch(tmp_path, nodes)
    assert launch.code == 0, launch.said
    assert launch.ranks() == {"node0": [0, 1, 5], "node1": [1, 1, 5], "node2": [2, 2, 5], "node3": [4, 1, 5]}
    visible = {name: launch.visible(name) for name in nodes}
    assert visible == {"node0": "GPU-1a1b", "node1": "GPU-2a1b", "node2": "GPU-1a1b,GPU-2a1b", "node3": "-1"}
    assert "Unlike builds of torch: cpu on node3; cu126 on node2; cu130 on node0, node1." in launch.said
    assert (
        "node1 does not train on GTX 1650 (GPU-1a1b) (training_cards says which cards train)." in launch.said
    )
    assert "node2 does not" not in launch.said


def test_cards_that_cannot_train_stop_the_launch(tmp_path: Path) -> None:
    nodes = {
        "node0": node("cu130", RTX3060),
        "node1": node("cpu", silent="2504"),
        "node2": node("cpu", RTX3090),
        "node3": node("cu126", card(1, "RTX 5090", "12.0")),
        "node4": node("cu130", RTX3090, trainer_cards=["GPU-9"]),
        "node5": node("cu130", RTX3090, silent="2504"),
    }
    launch = Launch(tmp_path, nodes)
    assert launch.code != 0
    for name, words in {
        "node1": "it has one NVIDIA card (10de:2504 at 0000:05:00.0), but no NVIDIA driver is loaded",
        "node2": "its torch is the build for processors, though its driver works",
        "node3": "torch_backend cu126 has no code for RTX 5090",
        "node4": "training_cards names GPU-9, which is none of its cards",
        "node5": "it has 2 NVIDIA cards, but nvidia-smi does not see 10de:2504 at 0000:05:00.0",
    }.items():
        assert f"{name} cannot train as it is: {words}" in launch.said
    assert "Without this node: --limit 'cluster:!node1'. On its processor: -e cpu=true" in launch.said
    assert "Without this node: --limit 'cluster:!node5'. With RTX 3090 only: -e cpu=true" in launch.said
    for name in ("node2", "node3", "node4"):  # it would change nothing there
        assert f"--limit 'cluster:!{name}'. " in launch.said
        assert not re.search(rf"cluster:!{name}'\. (With|On) ", launch.said)


def test_who_says_so_trains_on_the_processor_there(tmp_path: Path) -> None:
    nodes = {"node0": node("cu130", RTX3060), "node1": node("cpu", silent="2504")}
    for settings in nodes.values():
        settings["trainer_cpu"] = True
    launch = Launch(tmp_path, nodes)
    assert launch.code == 0, launch.said
    assert launch.ranks() == {"node0": [0, 1, 2], "node1": [1, 1, 2]}
    assert (launch.visible("node0"), launch.visible("node1")) == ("GPU-1a1b", "-1")


def test_another_trainer_is_refused(tmp_path: Path) -> None:
    other = node("cu130", RTX3060)
    other["recorded"]["files"]["/opt/aura/current"]["target"] = "releases/0000-cu130-91bc"
    launch = Launch(tmp_path, {"node0": node("cu130", RTX3060), "node1": other})
    assert launch.code != 0
    assert "the nodes together have 3f2a-cu130-91bc, 0000-cu130-91bc" in launch.said
