"""`launch.yml -e join=true` for a run that is under way: the role's own tasks and the nodes' own rank-status, on
directories of this machine; systemd alone is played by a script."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import tree
import yaml
from test_who_trains import ADDRESS, RUN, gang, node

# What a node's systemd does with its one rank, and what the rank says then.
SYSTEMD = """#!/bin/sh
cd {place}/$NODE && echo "$*" >>log || exit
case $1 in
list-units) [ ! -e active ] || echo aura-train@0.service loaded active running ;;
show) [ -e active ] && echo ActiveState=active || echo ActiveState=inactive ;;
disable) rm -f active ;;
enable)
    touch active && eval $(grep -E '^(RANK|WORLD_SIZE)=' etc/rank-0.env) || exit
    mkdir start-$WORLD_SIZE && cp etc/rank-0.env runs/mine/rank-$RANK/vote.json start-$WORLD_SIZE || exit
    said='{{"state": "training", "loss": 1.5, "away": []}}'
    [ $WORLD_SIZE -lt 3 ] || {{ rm active; said='{{"message": "rank 2 has no memory."}}'; }}
    echo "$said" >runs/mine/rank-$RANK/status.json ;;
esac
"""
OURS = {"/etc/aura": "etc", "/var/lib/aura/runs": "runs"}
ALL = ("node0", "node1", "node2")
SKIPPED = ("See what is there", "The cards that train are known")
# It belongs to root, as do the units.
WRITTEN = "Every rank has its variables, and its unit starts a container only where it shall"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The tasks, and the nodes' programs."""
    (tmp_path / "systemctl").write_text(SYSTEMD.format(place=tmp_path))
    status = (tree.ROOT / "roles/trainer/files/rank-status").read_text()
    here = f'Path("{tmp_path}", os.environ["NODE"],'
    for theirs, ours in {
        "import argparse\n": "import argparse\nimport os\n",
        'Path("/etc/aura")': f'{here} "etc")',
        'Path(words[words.index("--run-dir") + 1])': f'{here} "runs/mine")',
    }.items():
        assert theirs in status
        status = status.replace(theirs, ours)
    (tmp_path / "rank-status").write_text(status)
    for name in ("systemctl", "rank-status"):
        (tmp_path / name).chmod(0o755)
    for folder in ("tasks", "meta", "defaults", "vars"):
        (tmp_path / "roles/trainer" / folder).mkdir(parents=True)
        for path in (tree.ROOT / "roles/trainer" / folder).glob("*.yml"):
            text = path.read_text().replace("/opt/aura/rank-status", f"{tmp_path}/rank-status")
            text = text.replace("'/var/lib/aura/runs/'", f"'{tmp_path}/' ~ inventory_hostname ~ '/runs/'")
            for theirs, ours in OURS.items():
                text = text.replace(theirs, f"{tmp_path}/{{{{ inventory_hostname }}}}/{ours}")
            (tmp_path / "roles/trainer" / folder / path.name).write_text(text)
    tasks = tmp_path / "roles/trainer/tasks/launch.yml"
    kept = [task for task in yaml.safe_load(tasks.read_text()) if task["name"] not in SKIPPED]
    (written,) = (task for task in kept if task["name"] == WRITTEN)
    files = written.pop("write_files")["files"].replace(" + [__trainer_unit_of]", "")
    there = f"{tmp_path}/{{{{ inventory_hostname }}}}/etc/{{{{ item.path | basename }}}}"
    written |= {"loop": files, "ansible.builtin.copy": {"dest": there, "content": "{{ item.content }}"}}
    tasks.write_text(yaml.safe_dump(kept))
    for name in ALL:
        (tmp_path / name / "etc").mkdir(parents=True)
    return tmp_path


def launched(place: Path, *nodes: str, expect: int = 0) -> str:
    """What was said."""
    told = {
        "trainer_nodes": list(nodes), "trainer_run": "mine", "trainer_corpus": "es", "trainer_preset": "gpt2-nano",
        "trainer_address": ADDRESS, "trainer_first_step_timeout": 20, "trainer_join": True, "ansible_become": False,
        "ansible_connection": "local", "ansible_pipelining": True,
    }  # fmt: skip
    hosts = {name: {"__trainer_member": node(name, "cpu")} for name in nodes}
    (place / "hosts.json").write_text(json.dumps({"cluster": {"hosts": hosts, "vars": told}}))
    role = {"ansible.builtin.import_role": {"name": "trainer", "tasks_from": "launch"}}
    play = {"hosts": "cluster", "gather_facts": False, "any_errors_fatal": True, "tasks": [role]}
    play["environment"] = {"NODE": "{{ inventory_hostname }}", "PATH": f"{place}:{os.environ['PATH']}"}
    (place / "play.yml").write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        ["ansible-playbook", "-i", str(place / "hosts.json"), str(place / "play.yml")], cwd=tree.ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=240, check=False,
        env=os.environ | {"ANSIBLE_ROLES_PATH": str(place / "roles"), "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == expect, done.stdout
    return done.stdout


def started(place: Path, name: str, ranks: int) -> tuple[dict[str, str], str]:
    """The variables, and the vote, that a node's rank had at its start among so many."""
    directory = place / name / f"start-{ranks}"
    lines = (directory / "rank-0.env").read_text().splitlines()[1:]
    return dict(line.split("=", 1) for line in lines), (directory / "vote.json").read_text()


@pytest.fixture
def running(place: Path) -> Path:
    """The run on two of three nodes, with a step of which the first node knows."""
    members = [node(name, "cpu") for name in ALL[:2]]
    for number, name in enumerate(ALL[:2]):
        (file,) = gang.rank_files(members, name, {**RUN, "name": "mine"})
        (place / name / "etc/rank-0.env").write_text(file["content"])
        run = place / name / "runs/mine"
        (run / "checkpoints/checkpoint-step-5").mkdir(parents=True)
        (run / f"rank-{number}").mkdir()
        (run / f"rank-{number}/vote.json").write_text(f"what rank {number} said")
        (run / f"rank-{number}/status.json").write_text('{"state": "training", "loss": 1.5, "away": []}')
        (place / name / "active").touch()
    (place / "node0/runs/mine/model_config.json").write_text('{"step_tokens": 4096}')
    return place


def test_all_start_with_the_step_of_before_and_if_that_fails_the_others_go_on_as_they_were(
    running: Path,
) -> None:
    before = {name: (running / name / "etc/rank-0.env").read_text() for name in ALL[:2]}
    said = " ".join(launched(running, *ALL, expect=2).split())
    told, votes = zip(*(started(running, name, 3) for name in ALL), strict=True)
    assert [one["RANK"] for one in told] == ["0", "1", "2"]
    assert {one["AURA_STEP_TOKENS"] for one in told} == {"4096"}
    (launch,) = {one["AURA_LAUNCH"] for one in told}
    assert launch != RUN["launch"] and {*votes} == {f'{{"launch": "{launch}"}}\n'}
    assert "node2: rank 2 has no memory." in said
    assert "node0, node1 train on as before, without the others." in said
    assert {name: (running / name / "etc/rank-0.env").read_text() for name in ALL[:2]} == before
    assert [started(running, name, 2)[1] for name in ALL[:2]] == ["what rank 0 said", "what rank 1 said"]
    assert [(running / name / "active").exists() for name in ALL] == [True, True, False]


def test_who_also_trains_on_a_node_that_is_left_out_keeps_it_from_being_stopped(running: Path) -> None:
    said = launched(running, "node0", "node2", expect=2)
    assert "mine may train with rank 1 too" in said
    asked = {line.split()[0] for line in (running / "node0/log").read_text().splitlines()}
    assert asked == {"list-units", "show"}
