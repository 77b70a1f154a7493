"""What launch.yml makes of somebody else's script: refusals, each launcher's command, who was the first to fail."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from ansible import context
from ansible.utils.vars import load_extra_vars
from expressions import filled_in, loaded

launch = tree.plugin("filter/script_launch")
read_request = tree.plugin("filter/script_request").script_request


def node(number: int, *cards: str) -> dict[str, Any]:
    names = {"name": f"node{number}", "address": f"10.0.0.2{number}"}
    return names | {"cards": list(cards), "ranks": len(cards) or 1}


THREE = [node(0), node(1), node(2)]
UNEVEN = [node(0, "GPU-a", "GPU-b"), node(1, "GPU-c")]
MIXED = [node(0, "GPU-a"), node(1)]
WAYS_OUT = ["training_cards", "--limit", "launcher=torchrun"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/other.py").touch()
    return tmp_path


def asked(project: Path, **given: Any) -> dict[str, Any]:
    request: dict[str, Any] = read_request({"script": "train.py", **given}, str(project))
    return request


def planned(request: dict[str, Any], nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """launch.json and default_config.yaml, as the node reads them."""
    assert request["problem"] == ""
    files = launch.script_files(request, nodes, name, 12355, "/env/bin/python", 1, 600)
    return {
        "launch": json.loads(files["launch.json"]),
        "config": yaml.safe_load(files["default_config.yaml"]),
    }


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"script": ""}, "Which script?"),
        ({"script": "trian.py"}, "trian.py is not there"),
        ({"script": "scripts"}, "scripts is a directory"),
        ({"script": "train.sh"}, "train.sh is not there"),
        ({"directory": "scripts"}, "does not lie in the directory"),
        ({"requirements": "packages.txt"}, "packages.txt is not there"),
        ({"launcher": "mpirun"}, "no launcher 'mpirun': take one of torchrun, accelerate, deepspeed"),
        ({"launchr": "torchrun"}, "Unknown setting 'launchr' of a script. Did you mean launcher?"),
        ({"_raw_params": "data"}, "'data' belongs to no setting: a value with blanks is quoted once more"),
        ({"epochs": 3}, "The script's own flags: -e arguments='--epochs …'"),
        ({"run": "../mine"}, "cannot be called '../mine'"),
        ({"arguments": "--name 'mine"}, "cannot be taken apart (No closing quotation)"),
        ({"env": "A='b"}, "env cannot be taken apart (No closing quotation)"),
        ({"env": "A=1 b"}, "In env 'b' is no NAME=value."),
        ({"env": {"A-B": 1}}, "No environment variable can be called 'A-B'."),
        ({"env": "MASTER_ADDR=10.0.0.1"}, "The launch itself says what MASTER_ADDR is on each node"),
        ({"zero_stage": 1}, "only launcher=accelerate takes this"),
        ({"launcher": "accelerate", "zero_stage": 4}, "has to be one of 0, 1, 2, 3"),
        ({"launcher": "accelerate", "gradient_clipping": "much"}, "has to be a positive number"),
        ({"launcher": "accelerate", "gradient_clipping": 0.01}, "say -e zero_stage=1"),
        ({"launcher": "accelerate", "dynamo_backend": "induct"}, "has to be one of no, eager"),
        ({"most_megabytes": "all"}, "has to be a number"),
        ({"leave_out": "*/"}, "would leave out all of the directory"),
    ],
)
def test_what_cannot_be_run_is_refused(project: Path, given: dict[str, Any], sentence: str) -> None:
    assert sentence in asked(project, **given)["problem"]


def test_a_list_of_packages_that_is_no_text_is_refused_before_any_node_is_touched(project: Path) -> None:
    (project / "requirements.txt").write_text("-r base.txt\n")
    (project / "base.txt").write_text("torch==2.13.0\n", encoding="utf-16")
    said = asked(project)["problem"]
    assert f"The list of packages {project}/base.txt is no text in UTF-8" in said
    assert "pip freeze | Out-File -Encoding ascii base.txt" in said


@pytest.mark.parametrize(
    ("line", "is_here"),
    [
        ("-e .", True), ("-e file:///home/me/mine", True), ("--editable=./mine", True), ("./mine", True),
        ("..", True), (".[train]", True), ("/home/me/mine-1-py3-none-any.whl", True), ("file:///home/me/mine", True),
        ("mine @ file:///home/me/mine", True),
        ("-e git+https://example.org/mine", False), ("mine @ https://example.org/mine.whl", False), ("mine", False),
    ],
)  # fmt: skip
def test_what_lies_on_this_machine_is_no_package_of_a_node(project: Path, line: str, is_here: bool) -> None:
    """It would be built once, and stay what it was then."""
    (project / "requirements.txt").write_text(f"numpy\n{line}\n")
    assert (f"names {line}, which lies on this machine" in asked(project)["problem"]) is is_here


def test_where_else_packages_are_to_be_had_is_taken_from_every_list(project: Path) -> None:
    other, own = "--extra-index-url https://example.org/whl", "-i=https://example.org/own"
    (project / "requirements.txt").write_text(f"-r base.txt\n{other} # its\nnumpy\n")
    (project / "base.txt").write_text(f"{own}\n--no-binary numpy\n")
    assert asked(project)["indexes"] == [other, own]


def test_a_directory_with_keys_in_it_stays_here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in (tree.ROOT, tree.ROOT.parent):
        given = {"script": f"{tree.ROOT}/tests/check/tree.py", "directory": str(directory)}
        said = read_request(given, str(tree.ROOT))["problem"]
        assert said.endswith("and with it your keys: put the script into a directory of its own.")
    monkeypatch.setenv("HOME", str(project))
    assert f"holds {project}, and with it your keys" in asked(project)["problem"]
    assert asked(project, script="scripts/other.py")["problem"] == ""


def test_a_request_is_completed(project: Path) -> None:
    assert asked(project, leave_out="data/, ./logs,*.bin,")["leave_out"] == ["data", "logs", "*.bin"]
    request = asked(project, script="scripts/other.py", directory=".", arguments="--name 'my run' --lr 1e-4")
    wanted = {"program": "scripts/other.py", "run": "other", "launcher": "torchrun", "own_environment": False}
    assert request | wanted == request
    assert request["arguments"] == ["--name", "my run", "--lr", "1e-4"]
    (project / "requirements.txt").write_text("transformers\n")
    assert asked(project)["own_environment"]


@pytest.mark.parametrize(
    ("launcher", "nodes", "no_compiler", "words"),
    [
        ("torchrun", UNEVEN, [], []),
        ("deepspeed", UNEVEN, [], []),
        ("accelerate", UNEVEN, [], ["these would have node0 2, node1 1. Nothing was started.", *WAYS_OUT]),
        ("torchrun", MIXED, [], []),
        ("deepspeed", MIXED, [], ["node1 would train on the processor"]),
        ("torchrun", THREE, ["node1"], []),
        ("deepspeed", THREE, ["node1"], ["node1 has no C++ compiler, and DeepSpeed compiles while it runs."]),
    ],
)
def test_what_a_launcher_cannot_do_with_these_nodes_is_said(
    project: Path, launcher: str, nodes: list[dict[str, Any]], no_compiler: list[str], words: list[str]
) -> None:
    said = launch.script_problems(asked(project, launcher=launcher), nodes, no_compiler)
    assert len(said) == bool(words)
    for word in words:
        assert word in said[0]


def test_torchruns_command(project: Path) -> None:
    request = asked(project, arguments="--epochs 3", env="HF_HOME=/a WORDS='two words'")
    plan = planned(request, UNEVEN, "node1")
    assert plan["launch"]["command"] == [
        "/env/bin/python", "-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1", "--nproc-per-node=1",
        "--master-addr=10.0.0.20", "--master-port=12355", "--no-python", "/opt/aura/script/run-rank", "train.py",
        "--epochs", "3",
    ]  # fmt: skip
    assert (plan["launch"]["world_size"], plan["config"]) == (3, {})
    told = plan["launch"]["environment"]
    own = {"HF_HOME": "/a", "WORDS": "two words"}
    assert told | own | {"CUDA_VISIBLE_DEVICES": "GPU-c", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"} == told
    assert told["PATH"].startswith("/env/bin:")


def test_the_guides_file_for_accelerate(project: Path) -> None:
    """Guide 003's default_config.yaml, with this cluster's numbers."""
    even = [node(number, f"GPU-{number}a", f"GPU-{number}b") for number in range(4)]
    plan = planned(asked(project, launcher="accelerate", mixed_precision="bf16"), even, "node3")
    assert plan["config"] == {
        "machine_rank": 3, "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU",
        "downcast_bf16": "no", "dynamo_config": {"dynamo_backend": "NO"}, "enable_cpu_affinity": False,
        "main_process_ip": "10.0.0.20", "main_process_port": 12355, "main_training_function": "main",
        "mixed_precision": "bf16", "num_machines": 4, "num_processes": 8, "rdzv_backend": "static",
        "same_network": False, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
    }  # fmt: skip


def test_the_guides_blocks_for_deepspeed_and_for_torch_compile(project: Path) -> None:
    cards = [node(0, "GPU-a"), node(1, "GPU-b")]
    request = asked(
        project, launcher="accelerate", zero_stage=1, gradient_clipping=0.01, dynamo_backend="INDUCTOR",
        dynamo_mode="max-autotune",
    )  # fmt: skip
    config = planned(request, cards, "node0")["config"]
    assert config["distributed_type"] == "DEEPSPEED"
    assert config["deepspeed_config"] == {
        "deepspeed_multinode_launcher": "standard", "gradient_accumulation_steps": 1, "gradient_clipping": 0.01,
        "offload_optimizer_device": "none", "zero3_init_flag": False, "zero_stage": 1,
    }  # fmt: skip
    assert config["dynamo_config"] == {
        "dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune", "dynamo_use_dynamic": False,
        "dynamo_use_fullgraph": False,
    }  # fmt: skip
    assert request["packages"] == ["accelerate", "deepspeed"]


def test_without_cards_accelerate_is_told_so(project: Path) -> None:
    plan = planned(asked(project, launcher="accelerate"), THREE, "node2")
    assert plan["config"]["use_cpu"] is True
    assert plan["launch"]["environment"]["ACCELERATE_USE_CPU"] == "true"
    assert plan["launch"]["environment"]["CUDA_VISIBLE_DEVICES"] == "-1"


def test_deepspeeds_launcher_knows_every_nodes_ranks(project: Path) -> None:
    command = planned(asked(project, launcher="deepspeed"), UNEVEN, "node1")["launch"]["command"]
    world = next(word for word in command if word.startswith("--world_info=")).partition("=")[2]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"node0": [0, 1], "node1": [0]}
    assert "--node_rank=1" in command


def test_an_environment_is_named_after_all_that_is_in_it(project: Path) -> None:
    (project / "requirements.txt").write_text("-r base.txt\n")
    (project / "base.txt").write_text("transformers\n")
    names = set()

    def environment(wheelhouse: str = "0123456789ab", **given: Any) -> dict[str, str]:
        role = str(tree.ROOT / "roles/script")
        made: dict[str, str] = launch.script_environment(asked(project, **given), wheelhouse, "/cache", role)
        return made

    def add(*wheelhouse: str, **given: Any) -> None:
        names.add(environment(*wheelhouse, **given)["directory"])

    add()
    add("ba9876543210")
    add(launcher="accelerate")
    (project / "base.txt").write_text("transformers<5\n")
    add()
    (project / "wheels").mkdir()
    wheel = project / "wheels/one-1-py3-none-any.whl"
    wheel.touch()
    add()
    wheel.write_text("made again, under the same name")
    add()
    assert len(names) == 6
    # What a node says is no path on the controller.
    assert environment("0123456789ab/../corpora/es")["wheelhouse"] == "/cache/wheelhouse-none"


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


def rank(number: int, state: str, failed: float | None = None, **said: Any) -> dict[str, Any]:
    code = 1 if state == "failed" else 0
    return {"rank": number, "state": state, "failed": failed, "exit": code, "signal": None, "tail": []} | said


def status(number: int, *ranks: dict[str, Any], **said: Any) -> dict[str, Any]:
    found = {
        "ranks": list(ranks), "unit": "failed", "unit_exit": 1, "unit_signal": None, "unit_ended": 100.0,
        "active": False, **said,
    }  # fmt: skip
    return {"inventory_hostname": f"node{number}", "script_status": found}


VICTIM = status(0, rank(0, "failed", 20.4, tail=["RuntimeError: Connection closed by peer"]))


def failure(*statuses: dict[str, Any], launcher: str = "torchrun", journal: str = "") -> str:
    said: str = launch.failure_sentence(launch.script_failure(statuses), launcher, journal)
    return said


def test_the_first_to_fail_is_named_and_not_its_victims() -> None:
    first = status(2, rank(2, "failed", 20.1, tail=["ValueError: the batch is broken"]))
    said = failure(VICTIM, status(1, rank(1, "stopped")), first)
    assert said.startswith("Rank 2 on node2 ended with exit status 1, the first one to fail.")
    assert "the batch is broken" in said
    assert "Connection" not in said


def test_a_launcher_that_fails_before_its_ranks_is_named() -> None:
    statuses = [status(0, rank(0, "running"), unit="inactive"), status(1, unit_ended=5.0)]
    said = failure(*statuses, launcher="accelerate", journal="address already in use")
    assert said.startswith("The launcher (accelerate) on node1 ended with exit status 1")
    assert said.endswith("address already in use")


def test_who_had_no_memory_is_named_and_not_called_stopped() -> None:
    """systemd stops what is left of its unit, and the ranks of other nodes fail before that is known."""
    killed = status(1, rank(1, "stopped"), unit_result="oom-kill", unit_ended=31.0, unit_exit=0)
    said = failure(VICTIM, killed, journal="Killed")
    assert said.startswith("The launcher (torchrun) on node1 was ended because that PC's memory ran out")


def test_a_pc_that_went_off_is_named_and_not_its_victims() -> None:
    off = {"unit": "inactive", "unit_exit": 0, "unit_ended": None}
    lost = status(1, rank(1, "lost", went_off=True), **off)
    for among in ([VICTIM, lost], [lost]):
        assert failure(*among).startswith("node1 went off while its ranks were at work, and is back.")
    # What was killed because it did not stop in time is no cause.
    killed = status(1, rank(1, "lost", went_off=False), **off)
    assert launch.script_failure([VICTIM, killed])["node"] == "node0"


def test_who_was_stopped_has_not_failed() -> None:
    well = [status(0, rank(0, "stopped")), status(1, rank(1, "done"), unit="inactive")]
    assert launch.script_failure(well) == {}


def test_nobody_joins_a_run_beside_a_script() -> None:
    """A node may have left a run for it."""
    tasks = [task for play in loaded("playbooks/join.yml") for task in play.get("tasks", [])]
    (task,) = (task for task in tasks if task["name"] == "Assert that the run was launched with this node")
    words = task["ansible.builtin.assert"]

    def said(script: dict[str, Any]) -> str:
        known = {
            "inventory_hostname": "node3", "trainer_answers": True, "trainer_status": [{"run": "mine"}],
            "script_status": script,
        }  # fmt: skip
        return "" if filled_in(f"{{{{ {words['that']} }}}}", known) else filled_in(words["fail_msg"], known)

    assert said({}) == said({"active": False}) == ""
    assert said({"active": True}) == (
        "node3 is at work with a script, which playbooks/stop.yml --limit node3 ends. Nothing was started."
    )


@pytest.mark.parametrize("nothing", [{}, {"active": True, "ranks": []}])
def test_a_node_that_does_not_begin_is_named(nothing: dict[str, Any]) -> None:
    begun = status(0, rank(0, "running"), active=True, unit="active")
    silent = {"inventory_hostname": "node1", "script_status": nothing}
    said = failure(begun, silent, journal="waiting for master")
    assert said.startswith("node1 has not begun in time (script_start_timeout).")
    assert said.endswith("waiting for master")
