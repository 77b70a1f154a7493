"""What the nodes found out, as playbooks/connectivity.yml hands it over."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
Json = dict[str, Any]
Pair = tuple[str, str]  # sender or caller, receiver


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    complaint: str = ""  # why Ansible could not work there; "" where it could
    trainer: bool = False
    probe_error: str = ""  # why there is no document
    document: Json | None = None  # what `aura probe` printed
    reduced: Json | None = None  # {"rc", "stdout", "stderr"} of `aura check-allreduce`; None: it was not run

    @property
    def about(self) -> Json:
        return (self.document or {}).get("about") or {}

    @property
    def busy_ports(self) -> dict[str, Json]:
        return (self.document or {}).get("busy_ports") or {}


@dataclass(frozen=True)
class Evidence:
    nodes: list[Node]
    rendezvous_port: int
    ephemeral_port: int
    link_speed: float  # Mbit/s
    wsl: frozenset[str] = frozenset()  # names of nodes that are Linux under Windows

    @property
    def probed(self) -> list[Node]:
        return [node for node in self.nodes if node.document is not None]

    def address(self, name: str) -> str:
        return next((node.address for node in self.nodes if node.name == name), name)

    @property
    def documents(self) -> dict[str, Json]:
        return {node.name: node.document for node in self.nodes if node.document is not None}


def read_evidence(text: str) -> Evidence:
    """From {"addresses": {node: address}, "trainer", "probe", "all_reduce": {node: result of the command},
    "rendezvous_port", "ephemeral_port", "link_speed" (Mbit/s), "wsl" (nodes that are Linux under Windows)}.

    The results are what Ansible registered, unreachable and skipped ones included; the trainer's has the exit code 0
    where there is one. Raises ValueError, KeyError.
    """
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("not a JSON object")
    trainer, probe, reduce = (given.get(task, {}) for task in ("trainer", "probe", "all_reduce"))
    nodes = [
        read_node(name, address, trainer.get(name, {}), probe.get(name, {}), reduce.get(name, {}))
        for name, address in given["addresses"].items()
    ]
    return Evidence(
        nodes=nodes,
        rendezvous_port=int(given["rendezvous_port"]),
        ephemeral_port=int(given["ephemeral_port"]),
        link_speed=float(given.get("link_speed", 1000)),
        wsl=frozenset(given.get("wsl", [])),
    )


def read_node(name: str, address: str, trainer: Json, probe: Json, reduce: Json) -> Node:
    for result in (trainer, probe):
        if result.get("unreachable"):
            return Node(name, address, complaint=str(result.get("msg") or "no answer"))
    if trainer.get("failed"):
        return Node(name, address, complaint=str(trainer.get("msg") or "the first task failed"))
    reduced = None
    if reduce.get("unreachable"):
        reduced = {"rc": 255, "stdout": "", "stderr": f"{name} stopped answering over SSH"}
    elif "rc" in reduce or reduce.get("failed"):
        reduced = {
            "rc": reduce.get("rc", 1),
            "stdout": reduce.get("stdout", ""),
            "stderr": reduce.get("stderr") or reduce.get("msg", ""),
        }
    document, error = read_document(probe)
    return Node(name, address, "", trainer.get("rc") == 0, error, document, reduced)


def read_document(probe: Json) -> tuple[Json | None, str]:
    """The document in the result of `aura probe`, or why there is none."""
    if probe.get("skipped") or not probe:
        return None, "not run"
    try:
        document = json.loads(str(probe.get("stdout", "")).strip().rsplit("\n", 1)[-1])
    except ValueError:
        return None, last_line(probe.get("stderr") or probe.get("msg") or f"exit code {probe.get('rc')}")
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return None, "its answer is of another version"
    return document, ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def bandwidths(evidence: Evidence) -> dict[Pair, float]:
    """Mbit/s of the ordered pairs that were measured."""
    return {
        (sender, receiver): float(result["mbit_per_second"])
        for sender, document in evidence.documents.items()
        for receiver, result in (document.get("bandwidth") or {}).items()
        if result.get("ok")
    }


def clock_offsets(evidence: Evidence) -> dict[str, float]:
    """Seconds that each clock is ahead of the others' median (of the coordinator, where there are only two): so a
    coordinator whose clock is wrong is named itself, and not everybody else."""
    found: dict[str, float] = {}
    for name, document in evidence.documents.items():
        if name == document.get("coordinator"):
            found[name] = 0.0
        elif (document.get("clock") or {}).get("ok"):
            found[name] = float(document["clock"]["offset_seconds"])
    middle = statistics.median_low(found.values()) if len(found) > 2 else 0.0
    return {name: offset - middle for name, offset in found.items()}
