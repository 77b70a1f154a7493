"""What nodes are told of somebody else's script: its environment, its launcher's command; who has failed first."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Node = Mapping[str, Any]  # of group_member
Request = Mapping[str, Any]  # of script_request

RUN_RANK = "/opt/aura/script/run-rank"
SETTINGS = "/etc/aura/script"
RUNS = "/var/lib/aura/scripts"


def script_environment(request: Request, wheelhouse: str, cache: str, role: str) -> dict[str, str]:
    """The script's own environment: its directory on a node; on the controller the node's wheelhouse, and the wheels
    that it needs beside. Its name follows from all that is in it, and from how that comes together.
    """
    if not re.fullmatch(r"[0-9a-f]{12}", wheelhouse):  # what a node says is no path here
        wheelhouse = "none"
    programs = [Path(role, "files", name) for name in ("resolve-requirements", "install-environment")]
    texts = [
        *request["packages"],
        wheelhouse,
        *(path.read_text(encoding="utf-8").rstrip() for path in programs),
    ]
    if request["requirements"]:
        wheels = Path(request["requirements"]).parent / "wheels"
        texts += [request["requirements_sum"], *sorted(map(written, wheels.glob("*.whl")))]
    name = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    return {
        "directory": f"/opt/aura/script/environments/{name}",
        "wheels": f"{cache}/scripts/environment-{name}.tar",
        "wheelhouse": f"{cache}/wheelhouse-{wheelhouse}",
    }


def written(wheel: Path) -> str:
    """A name for this file, another one when it was made again."""
    return f"{wheel.name} {wheel.stat().st_size} {wheel.stat().st_mtime_ns}"


def script_problems(request: Request, nodes: Sequence[Node], without_compiler: Sequence[str]) -> list[str]:
    """Why these nodes cannot run this script together; empty when they can."""
    launcher, said = request["launcher"], []
    ways = "training_cards in hosts.yml says which cards of a node train, --limit 'cluster:!node3' leaves a node out"
    if launcher == "accelerate" and len({node["ranks"] for node in nodes}) > 1:
        counted = ", ".join(f"{node['name']} {node['ranks']}" for node in nodes)
        said.append(
            f"accelerate starts the same number of processes on every node, but these would have {counted}. "
            f"Nothing was started. What helps: {ways}, launcher=torchrun takes unequal numbers (and so does deepspeed)."
        )
    idle = [node["name"] for node in nodes if not node["cards"]]
    if launcher != "torchrun" and idle and len(idle) < len(nodes):
        said.append(
            f"{launcher} trains on cards or on processors, not on both, and {', '.join(idle)} would train on the "
            f"processor. Nothing was started. What helps: {ways}."
        )
    if request["compiles"] and without_compiler:
        who = "DeepSpeed" if "deepspeed" in request["packages"] else "dynamo_backend=inductor"
        said.append(
            f"{', '.join(without_compiler)} has no C++ compiler, and {who} compiles while it runs. Nothing was "
            "started. On that node: sudo apt install g++ python3.11-dev (where Python comes from the wheelhouse, as on "
            "Ubuntu: g++ alone)."
        )
    return said


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


def launcher_command(
    request: Request, nodes: Sequence[Node], index: int, port: int, python: str
) -> list[str]:
    """Every launcher starts run-rank in place of Python; that one starts the script and writes down how it ends."""
    words = [RUN_RANK, request["program"], *request["arguments"]]
    master, ranks = nodes[0]["address"], nodes[index]["ranks"]
    if request["launcher"] == "torchrun":
        return [
            python, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", f"--node-rank={index}",
            f"--nproc-per-node={ranks}", f"--master-addr={master}", f"--master-port={port}", "--no-python", *words,
        ]  # fmt: skip
    if request["launcher"] == "accelerate":
        config = f"--config_file={SETTINGS}/default_config.yaml"
        return [python, "-m", "accelerate.commands.launch", config, "--no_python", *words]
    # What `deepspeed --no_ssh` starts on every node. It would end at SIGTERM at once itself, and its ranks with it.
    world = {one["name"]: list(range(one["ranks"])) for one in nodes}
    return [
        python, "-u", "-m", "deepspeed.launcher.launch", f"--node_rank={index}", f"--master_addr={master}",
        f"--master_port={port}", f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
        "--no_python", *words,
    ]  # fmt: skip


def script_variables(
    request: Request, node: Node, python: str, threads: int, stop_timeout: int
) -> dict[str, str]:
    """The environment of the launcher and of its ranks."""
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
    if not node["cards"] and request["launcher"] == "deepspeed":
        environment["DS_ACCELERATOR"] = "cpu"
    if not node["cards"] and request["launcher"] == "accelerate" and "zero_stage" not in request["settings"]:
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def script_files(
    request: Request,
    nodes: Sequence[Node],
    name: str,
    port: int,
    python: str,
    threads: int,
    stop_timeout: int,
) -> dict[str, str]:
    """What one node is told, by the name of the file: launch.json, and default_config.yaml for accelerate."""
    index = [node["name"] for node in nodes].index(name)
    node = nodes[index]
    environment = script_variables(request, node, python, threads, stop_timeout)
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
        "command": launcher_command(request, nodes, index, port, python),
        "environment": environment,
    }
    config = accelerate_config(request, nodes, index, port) if request["launcher"] == "accelerate" else {}
    return {
        "default_config.yaml": f"# Written by Ansible (role script).\n{yaml.safe_dump(config)}",
        "launch.json": json.dumps(launch, indent=1) + "\n",
    }


def script_failure(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which rank (or which node's launcher) has failed first, of what every node's script_status says; {} if none has.

    The time is that of its traceback: whoever only loses a peer prints its own later, on clocks that agree to a few
    milliseconds. Where none has failed, a node of which nothing is heard.
    """
    failures, silent = [], []
    for one in nodes:
        name, status = one["inventory_hostname"], one["script_status"]
        alone = {"rank": None, "node": name, "tail": [], "exit": status.get("unit_exit"), "signal": None}
        ranks = status.get("ranks", [])
        failed = [rank for rank in ranks if rank["state"] == "failed"]
        failures += [{**rank, "node": name} for rank in failed]
        # A launcher may complain at its end that the first node's has left before it.
        through = [rank for rank in ranks if rank["state"] in ("done", "stopped")]
        if status.get("unit_result") == "oom-kill":
            # systemd stops the others then, so they say "stopped"; and those on other nodes fail before this is known.
            victim = next(
                (rank for rank in failed if rank["signal"] == "SIGKILL"), {"signal": status["unit_signal"]}
            )
            failures.append(alone | victim | {"node": name, "failed": 0.0, "out_of_memory": True})
        elif status.get("unit") == "failed" and not failed and not through:
            failures.append(alone | {"failed": status["unit_ended"], "signal": status["unit_signal"]})
        # It has booted since; the others lose their peer by that.
        elif any(rank.get("went_off") for rank in ranks):
            failures.append(alone | {"failed": 0.0, "went_off": True})
        if not status or (status["active"] and not ranks):
            silent.append(alone | {"exit": None})
    return min(failures, key=lambda failure: failure["failed"], default=silent[0] if silent else {})


def failure_sentence(failure: Mapping[str, Any], launcher: str, journal: str = "") -> str:
    who = f"Rank {failure['rank']}" if failure["rank"] is not None else f"The launcher ({launcher})"
    how = (
        f"was ended by {failure['signal']}"
        if failure["signal"]
        else f"ended with exit status {failure['exit']}"
    )
    if failure.get("out_of_memory"):
        how = "was ended because that PC's memory ran out (journalctl -k there)"
    first = f"{who} on {failure['node']} {how}, the first one to fail."
    if failure["exit"] is None and not failure["signal"] and not failure.get("out_of_memory"):
        first = f"{failure['node']} has not begun in time (script_start_timeout)."
    if failure.get("went_off"):
        first = f"{failure['node']} went off while its ranks were at work, and is back."
    last = "\n".join(failure["tail"]) or journal or "It has said nothing."
    return f"{first} Its last lines:\n{last}"


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "failure_sentence": failure_sentence,
            "script_environment": script_environment,
            "script_failure": script_failure,
            "script_files": script_files,
            "script_problems": script_problems,
        }
