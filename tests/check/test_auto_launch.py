"""`launch.yml -e preset=auto`: the role's own tasks and the real `aura plan`, for recorded nodes, up to what ranks are
told."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from aura.config import TrainConfig, resolve
from plays import played, role_with
from test_who_trains import ADDRESS, RTX3060, RTX3090, group, node

KEPT = (
    "Ask one node what auto is, for all",
    "Read how large a step of the run was, where it has learnt something",
    "Set a name for this launch",
    "Write each rank's variables",
)
PLACES = ("corpus", "run-dir", "backend")
TEXT = "el perro y la casa, un cable y cinco nodos que aprenden de noche. "


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """With a corpus, where the nodes have theirs."""
    (tmp_path / "text.txt").write_text("".join(f"{number} {TEXT}" for number in range(2000)))
    words = ["prepare", "--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "corpora/es")]
    words += ["--vocab-size", "270"]
    env = os.environ | {"PYTHONPATH": str(tree.ROOT / "training")}
    subprocess.run([sys.executable, "-m", "aura", *words], check=True, capture_output=True, env=env)
    return tmp_path


def launched(place: Path, **variables: Any) -> tuple[str, list[str]]:
    """node0 has a card, node1 trains on its processor: what was said, and the arguments of each rank."""
    program = f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES $* >>{place}/asked\nexec {sys.executable} -m aura $*\n"
    (place / "aura").write_text(program)
    (place / "aura").chmod(0o755)
    here = {"/opt/aura/current/venv/bin/aura": f"{place}/aura", "/var/lib/aura/": f"{place}/"}
    roles = role_with(place, "trainer", here)
    tasks = roles / "trainer/tasks/launch.yml"
    single = (task for one in yaml.safe_load(tasks.read_text()) for task in one.get("block", [one]))
    kept = [task for task in single if task["name"] in KEPT]
    assert len(kept) == len(KEPT)
    kept[-1].pop("ansible.builtin.template")
    kept[-1]["ansible.builtin.debug"] = {"msg": "{{ lookup('ansible.builtin.template', 'rank.env.j2') }}"}
    shutil.copytree(tree.ROOT / "roles/trainer/templates", roles / "trainer/templates", dirs_exist_ok=True)
    tasks.write_text(yaml.safe_dump(kept))
    told = {
        "trainer_run": "mine", "trainer_corpus": "es", "trainer_preset": "auto",
        "trainer_address": ADDRESS, "trainer_overrides": {"strategy": "auto"}, "ansible_become": False, **variables,
    }  # fmt: skip
    hosts = {
        "node0": {"ansible_connection": "local", "__trainer_member": node("node0", "cu130", RTX3090)},
        "node1": {"ansible_connection": "local", "__trainer_member": node("node1", "cpu")},
    }
    role = {"ansible.builtin.import_role": {"name": "trainer", "tasks_from": "launch"}}
    play = {"hosts": "cluster", "gather_facts": False, "any_errors_fatal": True, "tasks": [role]}
    groups = {"cluster": {"hosts": hosts, "vars": told}}
    training = str(tree.ROOT / "training")
    done = played(place, [play], groups, ANSIBLE_ROLES_PATH=str(roles), PYTHONPATH=training)
    found = re.findall(r"AURA_TRAIN_ARGUMENTS=(.*)", done.stdout)
    assert (done.returncode == 0) == bool(found), done.stdout
    return done.stdout, found


def config_of(arguments: str) -> TrainConfig:
    words = shlex.split(arguments)
    settings = {name[2:]: value for name, value in zip(words[::2], words[1::2], strict=True)}
    return resolve(settings.pop("preset"), {name: settings[name] for name in settings if name not in PLACES})


def test_all_ranks_get_what_the_smallest_device_allows_and_a_relaunch_the_same(place: Path) -> None:
    said, told = launched(place, trainer_hours=0.01, trainer_overrides={"strategy": "auto", "save_every": 7})
    asked = (place / "asked").read_text().splitlines()
    assert len(asked) == 1 and asked[0].startswith("-1 plan") and "--hours 0.01" in asked[0]
    assert "--nodes 2 --ranks-per-node 1" in asked[0]
    assert re.search(r"preset=auto: qwen3-nano with .*, because in 0.01 hours 2 x ", said)
    assert len(told) == 2 and told[0] == told[1]
    made = config_of(told[0])
    assert (made.preset, made.vocab_size, made.strategy, made.save_every) == ("qwen3-nano", 270, "auto", 7)
    (place / "runs/mine").mkdir(parents=True)
    (place / "runs/mine/config.json").write_text(json.dumps(asdict(made)))
    (place / "runs/mine/model_config.json").write_text('{"step_tokens": 4096, "global_batch_tokens": 0}')
    said, again = launched(place, trainer_hours=9, trainer_overrides={"strategy": "auto", "save_every": 7})
    assert "as this run has begun" in said
    assert again[0] == again[1] and config_of(again[0]) == made
    assert "AURA_STEP_TOKENS" not in said, "it has not learnt anything yet"
    (place / "runs/mine/checkpoints/interrupt-step-3").mkdir(parents=True)
    said, _ = launched(place, trainer_hours=9, trainer_overrides={"strategy": "auto", "save_every": 7})
    assert said.count("AURA_STEP_TOKENS=4096") == 2


def test_who_is_asked() -> None:
    two = node("node2", "cu130", RTX3060, RTX3090, wanted="all")
    members = [node("node0", "cu130", RTX3090), two]
    assert group.sizing(members, []) == {
        "node": "node2", "card": RTX3060["uuid"], "words": ["--nodes", "2", "--ranks-per-node", "1"],
    }  # fmt: skip
    assert group.sizing(members, ["node0"])["node"] == "node0"
    assert group.sizing([two], [])["words"] == ["--nodes", "1", "--ranks-per-node", "2"]
    assert group.sizing([*members, node("node3", "cpu")], [])["card"] == "-1"
