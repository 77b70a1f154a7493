"""Five nodes as `playbooks/connectivity.yml` finds them, to be spoilt."""

import copy
import json
from collections.abc import Iterable
from typing import Any

from aura.check.connectivity.checks import Check
from aura.check.connectivity.evidence import read_evidence
from aura.check.connectivity.report import judge

Json = dict[str, Any]
Pairs = Iterable[tuple[str, str]]
NAMES = [f"node{i}" for i in range(5)]
ADDRESSES = {name: f"192.168.50.{20 + i}" for i, name in enumerate(NAMES)}
PORTS = {"rendezvous": 12355, "ephemeral": 51234}
STALLED = {"ok": False, "error": "stalled: nothing arrived for 2 s"}


def document(name: str) -> Json:
    """What `aura probe` prints on a healthy node."""
    others = [other for other in NAMES if other != name]
    found: Json = {
        "schema": 1,
        "node": name,
        "complete": True,
        "coordinator": "node0",
        "busy_ports": {},
        "tcp": {other: {port: {"ok": True} for port in PORTS} for other in others},
        "lost": {},
        "bandwidth": {other: {"ok": True, "mbit_per_second": 941.0} for other in others},
        "about": {
            "hostname": name,
            "addresses": {"lo": ["127.0.0.1"], "eno1": [ADDRESSES[name]]},
            "interface": "eno1",
            "link": {"speed_mbit": 1000, "duplex": "full", "physical": True},
            "routes": {other: {"interface": "eno1"} for other in others},
            "resolves": {other: [ADDRESSES[other]] for other in NAMES},
            "release": "3f2a-cu130-91bc",
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "disk": {"path": "/var/lib/aura", "free_bytes": 400e9},
        },
    }
    if name != "node0":
        found["clock"] = {"ok": True, "offset_seconds": 4e-4}
    return found


class Cluster:
    """Five healthy nodes, to be spoilt."""

    def __init__(self) -> None:
        self.documents = {name: document(name) for name in NAMES}
        self.evidence: Json = {
            "addresses": dict(ADDRESSES),
            "trainer": {name: {"changed": False, "rc": 0} for name in NAMES},
            "probe": {},
            "all_reduce": {},
            "rendezvous_port": "12355",  # Ansible's templates make text of numbers
            "ephemeral_port": 51234,
            "link_speed": 1000,
        }
        for rank, name in enumerate(NAMES):
            line = (
                f"[Rank {rank}/5 | Node {name} | Device cpu] Backend=gloo | all_reduce = 15 (esperado 15) OK"
            )
            self.evidence["all_reduce"][name] = {"rc": 0, "stdout": line, "stderr": ""}

    def about(self, name: str) -> Json:
        return self.documents[name]["about"]

    def rate(self, pairs: Pairs, mbit: float) -> None:
        for sender, receiver in pairs:
            self.documents[sender]["bandwidth"][receiver] = {"ok": True, "mbit_per_second": mbit}

    def close(self, pairs: Pairs, error: str = "timeout", ports: Iterable[str] = PORTS) -> None:
        for caller, called in pairs:
            for port in ports:
                no = {"ok": False, "error": error, "detail": "no answer"}
                self.documents[caller]["tcp"][called][port] = no

    def skip_all_reduce(self) -> None:
        self.evidence["all_reduce"] = {name: {"skipped": True, "changed": False} for name in NAMES}

    def text(self) -> str:
        evidence = copy.deepcopy(self.evidence)
        for name, found in self.documents.items():
            evidence["probe"].setdefault(name, {"rc": 0, "stdout": json.dumps(found), "stderr": ""})
        return json.dumps(evidence)

    def judge(self) -> list[Check]:
        return judge(read_evidence(self.text()))

    def bad(self) -> list[Check]:
        return [check for check in self.judge() if check.status != "ok"]

    def only(self) -> Check:
        """The single thing that is not ok."""
        bad = self.bad()
        assert len(bad) == 1, bad
        return bad[0]

    def only_this(
        self, check_id: str, subject: str, message: str = "", remedy: str = "", status: str = "failed"
    ) -> None:
        check = self.only()
        assert (check.id, check.subject, check.status) == (check_id, subject, status)
        assert message in check.message
        assert remedy in check.remedy


def pairs_of(*names: str) -> list[tuple[str, str]]:
    return [(a, b) for a in NAMES for b in NAMES if a != b and (a in names or b in names)]


ALL_PAIRS = pairs_of(*NAMES)
