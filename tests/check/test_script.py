"""Somebody else's script: what is refused, what goes to a node and what stays there, each launcher's command."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from ansible import context
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible.utils.vars import load_extra_vars
from expressions import filled_in, loaded, variables_of
from plays import played

ROLE = tree.ROOT / "roles/script"
script = tree.plugin("filter/script")


def asked(project: Path, **given: Any) -> tuple[str, dict[str, Any]]:
    """Why it is refused, and what was asked for, as tasks/request.yml says it."""
    (block,) = loaded("roles/script/tasks/request.yml")
    refuse, complete = block["block"]
    known = variables_of("script") | block["vars"] | refuse["vars"] | {"role_path": str(ROLE)}
    known["script_given"] = {"script": str(project / "train.py"), **given}
    sentences = filled_in("{{ sentences | join(' ') }}", known)
    fact = complete["ansible.builtin.set_fact"]["script_request"]
    return sentences, {} if sentences else Templar(loader=DataLoader(), variables=known).template(fact)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in (
        "train.py", "lib/model.py", ".git/HEAD", "lib/__pycache__/model.pyc", "my-env/pyvenv.cfg", "my-env/bin/python",
        "checkpoint-500/model.safetensors", "data/text.txt", "wheels/one.txt", ".env", "lib/.env.local", ".ssh/id_rsa",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (tmp_path / "outside").mkdir()
    (root / "corpus").symlink_to(tmp_path / "outside")
    (root / "linked.py").symlink_to("train.py")
    return root


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"script": "trian.py"}, "trian.py is not there"),
        ({"script": str(tree.ROOT / "Makefile")}, "Makefile is not there, or no Python file"),
        ({"directory": "/usr/lib"}, "does not lie in the directory /usr/lib"),
        ({"directory": str(tree.ROOT.parent), "script": f"{tree.ROOT}/tests/check/tree.py"}, "and with it your keys"),
        ({"requirements": "packages.txt"}, "packages.txt is not there"),
        ({"launcher": "mpirun"}, "There is no launcher 'mpirun': take one of torchrun, accelerate, deepspeed."),
        ({"epochs": 3}, "Unknown setting of a script: epochs. The script's own flags: -e arguments='--epochs …'"),
        ({"run": "../mine"}, "A run cannot be called ../mine"),
        ({"env": "A=1 b"}, "In env b is no NAME=value."),
        ({"env": {"HF-TOKEN": "secret"}}, "In env HF-TOKEN is no NAME=value."),
        ({"leave_out": "data, *"}, "leave_out=* would leave out all of the directory"),
        ({"launcher": "accelerate", "mixed_precision": "fp64"}, "is fp64, but has to be one of no, fp16, bf16"),
        ({"launcher": "accelerate", "zero_stage": 4}, "zero_stage is 4, but has to be one of 0, 1, 2, 3."),
        ({"launcher": "accelerate", "zero_stage": 2, "gradient_clipping": -1}, "but has to be a positive number."),
        ({"zero_stage": 1}, "zero_stage: only launcher=accelerate takes this"),
        ({"launcher": "accelerate", "gradient_clipping": 0.01}, "gradient_clipping belongs to DeepSpeed: say"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(project: Path, given: dict[str, Any], sentence: str) -> None:
    assert sentence in asked(project, **given)[0]


def test_a_home_directory_stays_here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project / "lib"))
    assert "and with it your keys" in asked(project)[0]
    monkeypatch.setenv("HOME", str(project.parent))
    assert asked(project)[0] == ""


def test_a_request_is_completed(project: Path) -> None:
    own = {
        "env": "HF_HOME=/a WORDS='two words'",
        "arguments": "--name 'my run' --lr 1e-4",
        "leave_out": "data, *.bin,",
    }
    (project / "requirements.txt").touch()
    _, request = asked(
        project, launcher="accelerate", zero_stage=1, mixed_precision="BF16", wait="true", **own
    )
    wanted = {
        "program": "train.py", "run": "train", "packages": ["accelerate", "deepspeed"], "wait": True, "cpu": False,
        "environment": {"HF_HOME": "/a", "WORDS": "two words"}, "arguments": ["--name", "my run", "--lr", "1e-4"],
        "settings": {"zero_stage": "1", "mixed_precision": "bf16"},
        "leave_out": ["data", "*.bin"], "own_environment": True, "compiles": True,
        "requirements": f"{project}/requirements.txt",
    }  # fmt: skip
    assert request | wanted == request
    assert asked(project, env={"TOKEN": "a=b", "N": 1})[1]["environment"] == {"TOKEN": "a=b", "N": "1"}


def launched(project: Path, nodes: int = 1, **given: Any) -> str:
    """What a launch says that brings the directory to these nodes, folders on this machine."""
    place = project.parent
    facts = {"__script_environment": "", "__script_excluded": f"{place}/excluded", "__script_wheels": ""}
    tasks: list[dict[str, Any]] = [
        {"ansible.builtin.include_role": {"name": "script", "tasks_from": "request"},
         "vars": {"script_given": {"script": f"{project}/train.py", "directory": str(project), **given}}},
        {"ansible.builtin.include_role": {"name": "script", "tasks_from": "gather"}},
        {"ansible.builtin.include_role": {"name": "script", "tasks_from": "distribute"}},
    ]  # fmt: skip
    known = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_port": 22,
        "script_cache": f"{place}/cache",
    }
    hosts = {f"node{number}": {"node_folder": f"{place}/node{number}"} for number in range(nodes)}
    more = {"__script_run": "{{ node_folder }}/{{ script_request.run }}", **facts}
    play = {"hosts": "all", "gather_facts": False, "any_errors_fatal": True, "tasks": tasks}
    done = played(place, [play], {"all": {"hosts": hosts, "vars": known}}, "-e", json.dumps(more))
    return " ".join(done.stdout.split())


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_no_node_needs_is_left_out_and_said(project: Path) -> None:
    (project / ".#train.py").symlink_to("somebody@a-pc.1234")  # Emacs' lock
    (project / "all[1]").symlink_to(project.parent / "outside")
    said = launched(project, nodes=2)
    left = [
        ".#train.py",
        ".env",
        ".git",
        ".ssh",
        "all[1]",
        "checkpoint-500",
        "corpus",
        "lib/.env.local",
        "lib/__pycache__",
    ]
    assert "4 files (0.0 MB) of" in said and f"Left out: {', '.join(left)}, my-env, wheels." in said, said
    wanted = ["data/text.txt", "lib/model.py", "linked.py", "train.py"]
    for node in ("node0", "node1"):
        code = project.parent / node / "train/code"
        assert files_in(code) == wanted and not (code / "linked.py").is_symlink()
        assert code.stat().st_mode & 0o777 == 0o750
    launched(project, leave_out="data/,./lib/*.py")
    assert files_in(project.parent / "node0/train/code") == ["linked.py", "train.py"]


def test_a_directory_that_is_far_too_large_is_refused_with_ways_out(project: Path) -> None:
    with (project / "data/film.mp4").open("wb") as film:
        film.truncate(3_000_000)
    said = launched(project, most_megabytes=1)
    for part in ("has 3.0 MB", "most of it is data (3.0 MB)", "-e leave_out=data,…", "-e most_megabytes=3"):
        assert part in said, said
    assert not (project.parent / "node0").exists()


def test_a_directory_that_cannot_be_gathered_starts_nothing(project: Path) -> None:
    (project.parent / "cache").touch()
    said = launched(project)
    assert "project could not be read: mkdir:" in said and "Nothing was started." in said, said


def test_the_record_of_the_release_before_becomes_a_directory(project: Path) -> None:
    run = project.parent / "node0/train"
    (run / "code/lib").mkdir(parents=True)
    (run / "project").write_text(str(project.parent / "other"))
    for name in ("train.py", "lib/model.py", "lib/gone.py"):
        (run / "code" / name).write_text("of last week")
    brought = [hashlib.sha256(b"of last week").hexdigest()]
    record = {
        "train.py": brought,
        "lib/gone.py": brought,
        "lib/absent.py": brought,
        "lib/model.py": ["0", "1"],
    }
    (run / "sent").write_text(json.dumps(record))
    assert "The run train is that of" in launched(project)
    assert files_in(run / "code") == ["lib/gone.py", "lib/model.py", "train.py"]
    (run / "project").write_text(str(project))
    said = launched(project)
    assert "keeps what was written there" in said and ": lib/model.py." in said, said
    assert files_in(run / "code") == ["data/text.txt", "lib/model.py", "linked.py", "train.py"]
    assert (run / "code/train.py").read_text() == "train.py"


def test_a_file_that_became_a_directory_stays_one(project: Path) -> None:
    """Or a directory a file: where the script made it so. Where the project did, it goes to the node."""
    code = project.parent / "node0/train/code"
    for name in ("out", "log/first", "mine/first", "yours"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(name)
    launched(project)
    (code / "out").unlink()
    (code / "out").mkdir()
    (code / "out/step").write_text("50000")
    shutil.rmtree(code / "log")
    (code / "log").write_text("of the script")
    shutil.rmtree(project / "mine")
    (project / "mine").write_text("a file")
    (project / "yours").unlink()
    (project / "yours").mkdir()
    (project / "yours/first").write_text("in a directory")
    said = launched(project)
    assert "keeps what was written there" in said and ": log, out." in said, said
    assert (code / "log").read_text() == "of the script" and (code / "out/step").read_text() == "50000"
    assert (code / "mine").read_text() == "a file" and (code / "yours/first").exists()


def test_what_the_script_wrote_stays_and_what_is_gone_here_goes_there(project: Path) -> None:
    """Whatever the clocks: a trial's checkpoint takes no place of the cluster's."""
    code = project.parent / "node0/train/code"
    (project / "out").mkdir()
    (project / "out/ckpt.pt").write_text("trial, step 5")
    (project / "lib/run.sh").touch(0o750)
    launched(project)
    assert (code / "lib/run.sh").stat().st_mode & 0o100
    (code / "out/ckpt.pt").write_text("cluster, step 50000")
    (code / "out/step").write_text("50000")
    (project / "out/ckpt.pt").write_text("trial, step 10")
    (project / "out/step").write_text("10")
    (project / "lib/model.py").rename(project / "lib/net.py")
    (project / "train.py").write_text("newer")
    os.utime(project / "train.py", (1, 1))  # a clock that is behind
    said = launched(project)
    assert "keeps what was written there" in said and ": out/ckpt.pt, out/step." in said, said
    assert (code / "out/ckpt.pt").read_text() == "cluster, step 50000" and (
        code / "out/step"
    ).read_text() == "50000"
    assert (code / "lib/net.py").exists() and not (code / "lib/model.py").exists()
    assert (code / "train.py").read_text() == "newer"
    shutil.rmtree(project / "out")
    assert "keeps what" not in launched(project)
    assert (code / "out/ckpt.pt").read_text() == "cluster, step 50000"


def test_another_project_does_not_go_on_from_checkpoints_of_the_first(project: Path) -> None:
    launched(project)
    project.rename(project.parent / "other")
    said = launched(project.parent / "other")
    assert f"The run train is that of {project}: give this one another name, -e run=" in said, said


def node(number: int, *cards: str) -> dict[str, Any]:
    names = {"name": f"node{number}", "address": f"10.0.0.2{number}"}
    return names | {"cards": list(cards), "ranks": len(cards) or 1}


UNEVEN = [node(0, "GPU-a", "GPU-b"), node(1, "GPU-c")]


def written(project: Path, name: str, nodes: list[dict[str, Any]], **given: Any) -> Any:
    """A file of the last of these nodes, as it reads it."""
    known = variables_of("script") | {
        "__script_members": nodes, "__trainer_member": nodes[-1], "script_request": asked(project, **given)[1],
        "python": "/env/bin/python",
    }  # fmt: skip
    return yaml.safe_load(filled_in((ROLE / f"templates/{name}.j2").read_text(), known))


def test_torchruns_command(project: Path) -> None:
    launch = written(project, "launch.json", UNEVEN, arguments="--epochs 3", env="WORDS='two words'")
    assert launch["command"] == [
        "/env/bin/python", "-u", "-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1", "--nproc-per-node=1",
        "--master-addr=10.0.0.20", "--master-port=12355", "--no-python", "/opt/aura/script/run-rank", "train.py",
        "--epochs", "3",
    ]  # fmt: skip
    assert (launch["world_size"], launch["local_ranks"], launch["run"]) == (3, 1, "train")
    told = launch["environment"]
    cards = {"CUDA_VISIBLE_DEVICES": "GPU-c", "AURA_SCRIPT_CARDS": "GPU-c"}
    assert told | cards | {"WORDS": "two words", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"} == told
    assert told["PATH"].startswith("/env/bin:")


def test_deepspeeds_launcher_knows_every_nodes_ranks(project: Path) -> None:
    command = written(project, "launch.json", UNEVEN, launcher="deepspeed")["command"]
    world = next(word for word in command if word.startswith("--world_info=")).partition("=")[2]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"node0": [0, 1], "node1": [0]}
    assert "--node_rank=1" in command


def test_the_guides_file_for_accelerate(project: Path) -> None:
    """Guide 003's default_config.yaml, with this cluster's numbers."""
    even = [node(number, f"GPU-{number}a", f"GPU-{number}b") for number in range(4)]
    assert written(project, "default_config.yaml", even, launcher="accelerate", mixed_precision="bf16") == {
        "machine_rank": 3, "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU",
        "downcast_bf16": "no", "dynamo_config": {"dynamo_backend": "NO"}, "enable_cpu_affinity": False,
        "main_process_ip": "10.0.0.20", "main_process_port": 12355, "main_training_function": "main",
        "mixed_precision": "bf16", "num_machines": 4, "num_processes": 8, "rdzv_backend": "static",
        "same_network": False, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
    }  # fmt: skip


def test_the_guides_blocks_for_deepspeed_and_for_torch_compile(project: Path) -> None:
    asks = {
        "zero_stage": "1",
        "gradient_clipping": "0.01",
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "max-autotune",
    }
    config = written(project, "default_config.yaml", UNEVEN, launcher="accelerate", **asks)
    assert config["distributed_type"] == "DEEPSPEED"
    assert config["deepspeed_config"] == {
        "deepspeed_multinode_launcher": "standard", "gradient_accumulation_steps": 1, "gradient_clipping": 0.01,
        "offload_optimizer_device": "none", "zero3_init_flag": False, "zero_stage": 1,
    }  # fmt: skip
    assert config["dynamo_config"] == {
        "dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune", "dynamo_use_dynamic": False,
        "dynamo_use_fullgraph": False,
    }  # fmt: skip


def test_without_cards_accelerate_is_told_so(project: Path) -> None:
    three = [node(0), node(1), node(2)]
    assert written(project, "default_config.yaml", three, launcher="accelerate")["use_cpu"] is True
    told = written(project, "launch.json", three, launcher="accelerate")["environment"]
    assert (told["ACCELERATE_USE_CPU"], told["CUDA_VISIBLE_DEVICES"]) == ("true", "-1")


def wheel(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def test_packages_come_from_the_wheelhouse_and_from_the_projects_wheels(
    project: Path, tmp_path: Path
) -> None:
    requirements, names = project / "requirements.txt", set()

    def resolved() -> tuple[str, Path]:
        request = {"packages": [], "requirements": str(requirements)}
        names.add(name := script.environment_name(request, "0123456789ab"))
        words = [
            ROLE / "files/resolve-requirements",
            tmp_path / name,
            tmp_path / "wheelhouse",
            "cpu",
            sys.executable,
        ]
        return subprocess.run(
            [*words, requirements], stderr=subprocess.PIPE, text=True, check=False
        ).stderr, tmp_path / name

    requirements.write_text("-r base.txt\ntorch\n")
    (project / "base.txt").write_text("mine\n")
    assert "ansible-playbook site.yml --tags python_env" in resolved()[0]
    wheel(tmp_path / "wheelhouse/wheels", "torch")
    (tmp_path / "wheelhouse/requirements.txt").write_text("psutil==7.0 \\\n    --hash=sha256:1\n")
    (tmp_path / "wheelhouse/torch.txt").write_text("torch==1.0\n")
    wheel(project / "wheels", "mine")
    problem, made = resolved()
    assert not problem and (made / "ours.txt").read_text() == "torch==1.0\n"
    assert [path.name for path in (made / "wheels").iterdir()] == ["mine-1.0-py3-none-any.whl"]
    (project / "base.txt").write_text("mine<2\n-e ./lib\n")
    (project / "lib/pyproject.toml").write_text("[project]\nname = 'theirs'\nversion = '1'\n")
    assert "-e ./lib lies on this machine: nodes would keep what it was" in resolved()[0]
    assert len(names) == 3  # one for every content


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["arguments=--epochs 3 --name 'my run'", "run=mine"], "--epochs 3 --name 'my run'"),
        (["arguments='--epochs 3' run=mine"], "--epochs 3"),
        (['{"arguments": "--epochs 3", "run": "mine"}'], "--epochs 3"),
        (["run=mine", "arguments=lr=1 run=7"], "lr=1 run=7"),
        (["arguments=lr=1 run=7", '{"run": "mine"}'], "lr=1 run=7"),
    ],
)
def test_arguments_arrive_as_they_were_typed(
    words: list[str], arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ansible would cut them at the first blank."""
    monkeypatch.setattr(context, "CLIARGS", {"extra_vars": words})
    monkeypatch.setattr(load_extra_vars, "extra_vars", None, raising=False)  # what it has read before
    (given,) = tree.plugin("lookup/extra_vars").LookupModule().run([], whole=["arguments"])
    assert given == {"arguments": arguments, "run": "mine"}
