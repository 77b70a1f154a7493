"""What launch.yml makes of somebody else's script: what it refuses, and how its launcher is called on each node."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Node = Mapping[str, Any]  # name, address, ranks, cards (UUIDs; empty: its processor)
Request = dict[str, Any]

# The package that each launcher comes with, beside torch.
LAUNCHERS = {"torchrun": [], "accelerate": ["accelerate"], "deepspeed": ["deepspeed"]}
# What -e may say. Those of default_config.yaml belong to accelerate.
OWN = "script directory requirements launcher arguments env run wait cpu leave_out most_megabytes".split()
CLUSTER = ["training_cards", "rendezvous_port"]
ACCELERATE = {
    "mixed_precision": ["no", "fp16", "bf16", "fp8"],
    "dynamo_backend": [
        "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
        "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "ipex", "tvm",
    ],
    "dynamo_mode": ["default", "reduce-overhead", "max-autotune"],
    "zero_stage": ["0", "1", "2", "3"],
    "offload_optimizer": ["none", "cpu"],
    "gradient_clipping": float,
    "gradient_accumulation_steps": int,
}  # fmt: skip
ONLY_WITH_ZERO = ["offload_optimizer", "gradient_clipping", "gradient_accumulation_steps"]
PASSED_ON = re.compile(r"ansible_|script_|inventory_check_")  # settings of a role, and Ansible's own
# What the launch itself says to launchers and ranks.
TAKEN = re.compile(
    r"PATH|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES|AURA_SCRIPT_.*|TORCHELASTIC_.*"
    r"|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|ACCELERATE_USE_CPU|DS_ACCELERATOR"
)
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")
RUN_RANK = "/opt/aura/script/run-rank"
SETTINGS = "/etc/aura/script"
RUNS = "/var/lib/aura/scripts"


class Refused(Exception):
    """The sentence for the person who asked."""


def true(value: object) -> bool:
    return str(value).lower() in ("true", "yes", "1", "on")


def checked_names(given: Mapping[str, Any]) -> None:
    known = [*OWN, *CLUSTER, *ACCELERATE]
    for name in given:
        if name == "_raw_params":
            rest = f"{given[name]!r} belongs to no setting"
            raise Refused(f"{rest}: a value with blanks is quoted once more, -e \"leave_out='my data'\".")
        if name in known or PASSED_ON.match(name):
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(known)}."
        raise Refused(
            f"Unknown setting {name!r} of a script.{hint} The script's own flags: -e arguments='--{name} …'."
        )


def checked_value(name: str, value: str) -> str:
    allowed = ACCELERATE[name]
    if isinstance(allowed, list):
        if value.lower() not in allowed:
            raise Refused(f"{name} is {value!r}, but has to be one of {', '.join(allowed)}.")
        return value.lower()
    try:
        if allowed(value) >= (1 if allowed is int else 0):
            return value
    except ValueError:
        pass
    raise Refused(f"{name} is {value!r}, but has to be a positive number.")


def files_of(given: Mapping[str, Any], here: str) -> dict[str, str]:
    """The script, the directory that goes to the nodes, the list of packages; paths are relative to `here`."""

    def path(name: str) -> Path:
        return Path(here, Path(str(given[name])).expanduser()).resolve()

    script = path("script")
    if not script.is_file():
        what = "is a directory" if script.is_dir() else "is not there"
        raise Refused(f"The script {script} {what}. Name a Python file: -e script=/path/train.py")
    if script.suffix != ".py":
        raise Refused(f"The script {script} is no Python file (.py): launchers start Python on every node.")
    directory = path("directory") if "directory" in given else script.parent
    if not script.is_relative_to(directory):
        raise Refused(
            f"The script {script} does not lie in the directory {directory}, which goes to the nodes."
        )
    requirements = path("requirements") if "requirements" in given else directory / "requirements.txt"
    if "requirements" in given and not requirements.is_file():
        raise Refused(f"The list of packages {requirements} is not there.")
    return {
        "script": str(script),
        "directory": str(directory),
        "program": str(script.relative_to(directory)),
        "requirements": str(requirements) if requirements.is_file() else "",
    }


def variables(given: str | Mapping[str, Any]) -> dict[str, str]:
    """The script's own environment variables: a dictionary, or NAME=value, quoted as in a shell."""
    if isinstance(given, str):
        try:
            words = shlex.split(given)
        except ValueError as error:
            raise Refused(f"env cannot be taken apart ({error}).") from None
        if wrong := [word for word in words if "=" not in word]:
            raise Refused(f"In env {wrong[0]!r} is no NAME=value.")
        given = dict(word.split("=", 1) for word in words)
    for name in given:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise Refused(f"No environment variable can be called {name!r}.")
        if TAKEN.fullmatch(name):
            raise Refused(f"The launch itself says what {name} is on each node: leave it out of env.")
    return {name: str(value) for name, value in given.items()}


def read_request(given: Mapping[str, Any], here: str) -> Request:
    checked_names(given)
    if not given.get("script"):
        raise Refused("Which script? Name a Python file: -e script=/path/train.py")
    request: Request = {"problem": "", **files_of(given, here)}
    launcher = str(given.get("launcher", "torchrun"))
    if launcher not in LAUNCHERS:
        raise Refused(f"There is no launcher {launcher!r}: take one of {', '.join(LAUNCHERS)}.")
    run = str(given.get("run", Path(request["script"]).stem))
    if not NAME.fullmatch(run):
        raise Refused(
            f"A run cannot be called {run!r}: letters, digits, '.', '_' and '-', and at most 61 of them."
        )
    try:
        arguments = shlex.split(str(given.get("arguments", "")))
    except ValueError as error:
        raise Refused(f"The arguments cannot be taken apart ({error}): {given['arguments']}") from None
    settings = {name: checked_value(name, str(given[name])) for name in ACCELERATE if name in given}
    if settings and launcher != "accelerate":
        raise Refused(
            f"{', '.join(settings)}: only launcher=accelerate takes this, for its default_config.yaml. "
            f"With {launcher} the script's own flags say it (-e arguments=…)."
        )
    orphans = [name for name in ONLY_WITH_ZERO if name in settings]
    if orphans and "zero_stage" not in settings:
        raise Refused(f"{', '.join(orphans)} belongs to DeepSpeed: say -e zero_stage=1 (or 2, 3), too.")
    most = str(given.get("most_megabytes", 500))
    if not most.isdecimal() or int(most) == 0:
        raise Refused(
            f"most_megabytes is {most!r}, but has to be a number: how large the directory may be, in MB."
        )
    packages = LAUNCHERS[launcher] + (["deepspeed"] if "zero_stage" in settings else [])
    left_out = given.get("leave_out", [])
    return request | {
        "launcher": launcher,
        "run": run,
        "arguments": arguments,
        "environment": variables(given.get("env", {})),
        "settings": settings,
        "packages": packages,
        "most_megabytes": int(most),
        "leave_out": left_out.split(",") if isinstance(left_out, str) else list(left_out),
        "own_environment": bool(packages or request["requirements"]),
        # Both compile while they run: torch.compile its kernels, DeepSpeed its operators.
        "compiles": "deepspeed" in packages or settings.get("dynamo_backend") == "inductor",
        "wait": true(given.get("wait", False)),
        "cpu": true(given.get("cpu", False)),
    }


def script_request(given: Mapping[str, Any], here: str) -> Request:
    """What was asked for, complete; or a dictionary with the sentence that refuses it, in `problem`."""
    try:
        return read_request(given, here)
    except Refused as refused:
        return {"problem": str(refused)}


def requirement_texts(path: Path, seen: set[Path]) -> list[str]:
    """The text of a list of packages, and of those that it names with -r and -c."""
    if path in seen or not path.is_file():
        return []
    seen.add(path)
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"^\s*(?:-r|-c|--requirement|--constraint)[\s=]+(\S+)", text, re.MULTILINE)
    return [text, *(other for name in named for other in requirement_texts(path.parent / name, seen))]


def environment_name(request: Request, *others: str) -> str:
    """The name of a script's environment: it follows from all that is in it."""
    texts = [*request["packages"], *others]
    if request["requirements"]:
        path = Path(request["requirements"])
        texts += requirement_texts(path, set())
        texts += sorted(wheel.name for wheel in (path.parent / "wheels").glob("*.whl"))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def counted(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{node['name']} {node['ranks']}" for node in nodes)


def script_refusal(request: Request, nodes: Sequence[Node]) -> str:
    """Why these nodes cannot run this script together; empty when they can."""
    launcher = request["launcher"]
    ways = "training_cards in hosts.yml says which cards of a node train, --limit 'cluster:!node3' leaves a node out"
    if launcher == "accelerate" and len({node["ranks"] for node in nodes}) > 1:
        return (
            f"accelerate starts the same number of processes on every node, but these would have {counted(nodes)}. "
            f"Nothing was started. What helps: {ways}, launcher=torchrun takes unequal numbers (and so does deepspeed)."
        )
    idle = [node["name"] for node in nodes if not node["cards"]]
    if launcher != "torchrun" and idle and len(idle) < len(nodes):
        return (
            f"{launcher} trains on cards or on processors, not on both, and {', '.join(idle)} would train on the "
            f"processor. Nothing was started. What helps: {ways}."
        )
    return ""


def accelerate_config(request: Request, nodes: Sequence[Node], index: int, port: int) -> dict[str, Any]:
    """default_config.yaml of one node. (MULTI_CPU would want mpirun; with use_cpu the same processes take gloo.)"""
    settings = request["settings"]
    zero, dynamo = "zero_stage" in settings, settings.get("dynamo_backend", "no").upper()
    config: dict[str, Any] = {
        "machine_rank": index,
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "DEEPSPEED" if zero else "MULTI_GPU",
        "downcast_bf16": "no",
        "dynamo_config": {"dynamo_backend": dynamo},
        "enable_cpu_affinity": False,
        "main_process_ip": nodes[0]["address"],
        "main_process_port": port,
        "main_training_function": "main",
        "mixed_precision": settings.get("mixed_precision", "no"),
        "num_machines": len(nodes),
        "num_processes": sum(node["ranks"] for node in nodes),
        "rdzv_backend": "static",
        "same_network": False,
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": not nodes[index]["cards"],
    }
    if dynamo != "NO":
        config["dynamo_config"] |= {
            "dynamo_mode": settings.get("dynamo_mode", "default"),
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
        }
    if zero:
        config["deepspeed_config"] = {
            "deepspeed_multinode_launcher": "standard",
            "gradient_accumulation_steps": int(settings.get("gradient_accumulation_steps", 1)),
            "gradient_clipping": float(settings.get("gradient_clipping", 1.0)),
            "offload_optimizer_device": settings.get("offload_optimizer", "none"),
            "zero3_init_flag": False,
            "zero_stage": int(settings["zero_stage"]),
        }
    return config


def script_launch(
    request: Request,
    nodes: Sequence[Node],
    name: str,
    port: int,
    python: str,
    threads: int,
    stop_timeout: int,
) -> dict[str, Any]:
    """What one node is given: launch.json, and default_config.yaml (empty where its launcher reads none).

    Every launcher starts run-rank in place of Python; that one starts the script and writes down how it ends.
    """
    index = [node["name"] for node in nodes].index(name)
    node, master = nodes[index], nodes[0]["address"]
    words = [RUN_RANK, request["program"], *request["arguments"]]
    cards = ",".join(node["cards"]) or "-1"
    environment = request["environment"] | {
        # As in an activated environment: DeepSpeed looks for its ninja there.
        "PATH": f"{Path(python).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "AURA_SCRIPT_PYTHON": python,
        "AURA_SCRIPT_RANKS": f"{RUNS}/{request['run']}/ranks",
        "AURA_SCRIPT_CARDS": cards,
        "CUDA_VISIBLE_DEVICES": cards,
        # Not 30 seconds: as long as the unit waits. (Read by torchrun and by accelerate, from torch 2.12 on.)
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(stop_timeout),
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    config = {}
    if request["launcher"] == "torchrun":
        command = [
            python, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", f"--node-rank={index}",
            f"--nproc-per-node={node['ranks']}", f"--master-addr={master}", f"--master-port={port}", "--no-python",
            *words,
        ]  # fmt: skip
    elif request["launcher"] == "accelerate":
        config = accelerate_config(request, nodes, index, port)
        if not node["cards"] and "zero_stage" not in request["settings"]:
            environment["ACCELERATE_USE_CPU"] = "true"
        command = [
            python, "-m", "accelerate.commands.launch", f"--config_file={SETTINGS}/default_config.yaml", "--no_python",
            *words,
        ]  # fmt: skip
    else:
        # What `deepspeed --no_ssh` starts on every node. It would end at SIGTERM at once itself, and its ranks with it.
        world = {one["name"]: list(range(one["ranks"])) for one in nodes}
        command = [
            python, "-u", "-m", "deepspeed.launcher.launch", f"--node_rank={index}", f"--master_addr={master}",
            f"--master_port={port}", f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
            "--no_python", *words,
        ]  # fmt: skip
        if not node["cards"]:
            environment["DS_ACCELERATOR"] = "cpu"
    launch = {
        "node": name,
        "run": request["run"],
        "launcher": request["launcher"],
        "program": request["program"],
        "world_size": sum(one["ranks"] for one in nodes),
        "local_ranks": node["ranks"],
        "address": node["address"],
        "directory": f"{RUNS}/{request['run']}/code",
        "ranks": environment["AURA_SCRIPT_RANKS"],
        "command": command,
        "environment": environment,
    }
    return {"launch": launch, "config": config}


def first_failure(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which rank (or which node's launcher) has failed first, of what every node says (script-status); {} if none has.

    The time is that of its traceback: whoever only loses a peer prints its own later, on clocks that agree to a few
    milliseconds.
    """
    failures = []
    for status in statuses:
        ranks = [rank for rank in status.get("ranks", []) if rank["state"] == "failed"]
        failures += [{**rank, "node": status["node"]} for rank in ranks]
        # A launcher may complain at its end that the first node's has left before it.
        through = [rank for rank in status.get("ranks", []) if rank["state"] in ("done", "stopped")]
        if status.get("unit_failed") and not ranks and not through:
            alone = {"rank": None, "node": status["node"], "failed": status["unit_ended"], "tail": []}
            failures.append(alone | {"exit": status["unit_exit"], "signal": status["unit_signal"]})
    return min(failures, key=lambda failure: failure["failed"], default={})


def failure_sentence(failure: Mapping[str, Any], launcher: str, journal: str = "") -> str:
    who = f"Rank {failure['rank']}" if failure["rank"] is not None else f"The launcher ({launcher})"
    how = (
        f"was ended by {failure['signal']}"
        if failure["signal"]
        else f"ended with exit status {failure['exit']}"
    )
    last = "\n".join(failure["tail"]) or journal or "It has said nothing."
    return f"{who} on {failure['node']} {how}, the first one to fail. Its last lines:\n{last}"


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "environment_name": environment_name,
            "failure_sentence": failure_sentence,
            "first_failure": first_failure,
            "script_launch": script_launch,
            "script_refusal": script_refusal,
            "script_request": script_request,
        }
