"""`launch.yml -e join=true` for a run that is under way: the role's own tasks and the nodes' own rank-status, on
directories of this machine; systemd alone is played by a script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from plays import played, role_with
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
[ -e active ] || [ "$(cat goes 2>/dev/null)" != $1 ] || mv goes gone
"""
OURS = {
    "/etc/aura": "etc", "/var/lib/aura/runs": "runs", "/dev/shm/aura-train": "memory",
    "/etc/systemd/system/aura-train@.service.d": "etc", "/etc/systemd/system/multi-user.target.wants": "at-boot",
}  # fmt: skip
ALL = ("node0", "node1", "node2")
SKIPPED = ("See what is there", "The cards that train are known")
# What write_files writes belongs to root: here the same, by who runs the tests.
WRITE = (
    "cd {place}/{{{{ inventory_hostname }}}}/etc && {{{{ 'rm -f' if item.absent | default(false) else "
    "'printf %s ' ~ (item.content | default(item.copy)) | quote ~ ' >' }}}} {{{{ item.path | basename }}}}"
)


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
    texts = {"/opt/aura/rank-status": f"{tmp_path}/rank-status"}
    for theirs, ours in OURS.items():
        texts[f"'{theirs}/'"] = f"'{tmp_path}/' ~ inventory_hostname ~ '/{ours}/'"
        texts[theirs] = f"{tmp_path}/{{{{ inventory_hostname }}}}/{ours}"
    tasks = role_with(tmp_path, "trainer", texts) / "trainer/tasks"
    gang_tasks = yaml.safe_load((tasks / "gang.yml").read_text())
    (tasks / "gang.yml").write_text(yaml.safe_dump([one for one in gang_tasks if one["name"] not in SKIPPED]))
    for path in (tasks / "launch.yml", tasks / "as_before.yml"):
        rewritten = [written(task, tmp_path) for task in yaml.safe_load(path.read_text())]
        path.write_text(yaml.safe_dump(rewritten))
    for name in ALL:
        (tmp_path / name / "etc").mkdir(parents=True)
    return tmp_path


def written(task: dict[str, Any], place: Path) -> dict[str, Any]:
    blocks = {"block", "rescue"} & set(task)
    if blocks:
        return task | {key: [written(one, place) for one in task[key]] for key in blocks}
    if "write_files" not in task:
        return task
    files = task.pop("write_files")["files"]
    return task | {"loop": files, "ansible.builtin.shell": WRITE.format(place=place)}


def launched(place: Path, *nodes: str, expect: int = 0) -> str:
    """What was said."""
    told = {
        "trainer_run": "mine", "trainer_corpus": "es", "trainer_preset": "gpt2-nano",
        "trainer_address": ADDRESS, "trainer_first_step_timeout": 20, "trainer_join": True, "ansible_become": False,
        "ansible_pipelining": True, "ansible_host": "127.0.0.1", "ansible_port": 1,
        # A node whose cable is out is one whose address nobody listens at.
        "ansible_connection": f"{{{{ 'ssh' if ('{place}/' ~ inventory_hostname ~ '/gone') is file else 'local' }}}}",
    }  # fmt: skip
    hosts = {name: {"__trainer_member": node(name, "cpu")} for name in ALL}
    role = {"ansible.builtin.import_role": {"name": "trainer", "tasks_from": "launch"}}
    play = {"hosts": ",".join(nodes), "gather_facts": False, "any_errors_fatal": True, "tasks": [role]}
    play["environment"] = {"NODE": "{{ inventory_hostname }}", "PATH": f"{place}:{os.environ['PATH']}"}
    groups = {"cluster": {"hosts": hosts, "vars": told}}
    done = played(place, [play], groups, ANSIBLE_ROLES_PATH=f"{place}/roles")
    assert done.returncode == expect, done.stdout
    return " ".join(done.stdout.split())


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


def told(place: Path) -> list[str]:
    return [(place / name / "etc/rank-0.env").read_text() for name in ALL[:2]]


def trains(place: Path) -> list[bool]:
    return [(place / name / "active").exists() for name in ALL]


def stopped(place: Path) -> bool:
    return any("disable" in (place / name / "log").read_text() for name in ALL[:2])


def test_all_start_with_the_step_of_before_or_the_others_go_on_as_they_were(running: Path) -> None:
    before = told(running)
    of_an_earlier_launch = running / "node0/at-boot/aura-train@1.service"
    of_an_earlier_launch.parent.mkdir()
    of_an_earlier_launch.touch()
    said = launched(running, *ALL, expect=2)
    assert not of_an_earlier_launch.exists()
    rank_told, votes = zip(*(started(running, name, 3) for name in ALL), strict=True)
    assert [one["RANK"] for one in rank_told] == ["0", "1", "2"]
    assert {one["AURA_STEP_TOKENS"] for one in rank_told} == {"4096"}
    (launch,) = {one["AURA_LAUNCH"] for one in rank_told}
    assert launch != RUN["launch"] and {*votes} == {f'{{"launch": "{launch}"}}\n'}
    assert "node2: rank 2 has no memory." in said
    assert "node0, node1 train on as before, without the others." in said
    assert told(running) == before
    assert [started(running, name, 2)[1] for name in ALL[:2]] == ["what rank 0 said", "what rank 1 said"]
    assert trains(running) == [True, True, False]


def test_who_also_trains_on_a_node_that_is_left_out_keeps_it_from_being_stopped(running: Path) -> None:
    said = launched(running, "node0", "node2", expect=2)
    assert "mine may train with rank 1 too" in said
    asked = {line.split()[0] for line in (running / "node0/log").read_text().splitlines()}
    assert asked == {"list-units", "show"}


def test_a_run_that_none_of_these_nodes_trains_is_not_begun_a_second_time(running: Path) -> None:
    said = launched(running, "node2", expect=2)
    assert "None of these nodes trains mine. It may be under way on node0, node1" in said
    assert trains(running) == [True, True, False]


def test_a_rank_that_has_ended_on_a_node_of_the_launch_is_none_that_is_left_out(running: Path) -> None:
    """The other one waits for it, and cannot say who is away. And the step is kept where only a copy in memory has been
    written."""
    (running / "node0/runs/mine/checkpoints/checkpoint-step-5").rmdir()
    (running / "node0/memory/mine/checkpoint-step-5").mkdir(parents=True)
    (running / "node1/active").unlink()
    (running / "node0/runs/mine/rank-0/status.json").write_text('{"state": "joining"}')
    before = told(running)
    said = launched(running, *ALL, expect=2)
    assert [started(running, name, 3)[0]["RANK"] for name in ALL] == ["0", "1", "2"]
    assert started(running, "node0", 3)[0]["AURA_STEP_TOKENS"] == "4096"
    # It is as it was: join.yml brings it back to this run, and not to the launch that has failed.
    assert "node0 train on as before, without the others." in said
    assert trains(running) == [True, False, False] and told(running) == before
    assert (running / "node1/runs/mine/rank-1/vote.json").read_text() == "what rank 1 said"


def test_what_cannot_be_done_before_the_others_are_stopped_stops_nobody(running: Path) -> None:
    (running / "node2/runs").touch()
    launched(running, *ALL, expect=2)
    assert trains(running) == [True, True, False] and not stopped(running)


def test_what_breaks_after_the_others_were_stopped_has_them_go_on_as_they_were(running: Path) -> None:
    (running / "node2/runs/mine").mkdir(parents=True)
    (running / "node2/runs/mine/rank-2").touch()
    (running / "node0/etc/container.conf").write_text("as it was before containers\n")
    with (running / "node1/etc/rank-0.env").open("a") as file:
        file.write("AURA_IMAGE=sha256:abc\n")
    before = told(running)
    said = launched(running, *ALL, expect=2)
    assert 'node2: "What earlier launches said is out of the way' in said and '" failed: mkdir:' in said
    assert "node0, node1 train on as before, without the others." in said
    assert stopped(running) and trains(running) == [True, True, False] and told(running) == before
    assert [started(running, name, 2)[1] for name in ALL[:2]] == ["what rank 0 said", "what rank 1 said"]
    # Each unit starts a container where its rank was in one, and nowhere else.
    assert [(running / name / "etc/container.conf").exists() for name in ALL[:2]] == [False, True]


def test_who_is_lost_after_the_others_were_stopped_is_said_and_they_go_on(running: Path) -> None:
    """Before a task that does not ignore it."""
    (running / "node1/goes").write_text("show")
    said = launched(running, *ALL, expect=4)
    again = "node0, node1 were started again as before, and do not train yet: "
    assert f"{again}node1: it does not answer." in said
    assert trains(running) == [True, False, False]
