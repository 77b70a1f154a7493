"""Judges what `aura probe` and `aura check-allreduce` found on the nodes: a line per check, a remedy per failure.

Runs on the controller, standard library only: `playbooks/connectivity.yml` gives it, as JSON on standard input, the
raw results of its tasks (see `read_evidence`). `--json FILE` also writes the machine-readable result:

    {"schema": 1, "status": "ok|warning|failed", "nodes": [...],
     "checks": [{"id", "status": "ok|warning|failed", "subject", "message", "remedy"}, ...],
     "bandwidth_mbit": {sender: {receiver: rate or null}}, "clock_offset_seconds": {node: seconds or null}}

Every id of `CHECKS` comes at least once, in that order: once with subject "all" where nothing is wrong, else once for
each node, pair or cable at fault.

Exit codes: 0 nothing failed (there may be warnings), 2 at least one check failed, 1 the input could not be read.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
Json = dict[str, Any]
Status = Literal["ok", "warning", "failed"]
Pair = tuple[str, str]  # sender or caller, receiver

CLOCK_WARN, CLOCK_FAIL = 0.1, 2.0  # seconds
RATE_WARN, RATE_FAIL = 0.8, 0.5  # of the link's speed; a healthy link gives 0.94
DISK_WARN, DISK_FAIL = 5e9, 1e9  # bytes

MARKS: dict[Status, str] = {"ok": "✓", "warning": "!", "failed": "✗"}
TITLES = {
    "answers": "answers over SSH",
    "trainer": "trainer installed",
    "probe": "probe ran",
    "address": "LAN address",
    "hostname": "hostname",
    "names": "names resolve",
    "interface": "interface",
    "link": "link speed",
    "rendezvous_port": "port is free",
    "tcp_rendezvous": "TCP, rendezvous",
    "tcp_ephemeral": "TCP, any port",
    "bandwidth": "bandwidth",
    "clock": "clocks",
    "release": "release",
    "versions": "versions",
    "disk": "free disk",
    "all_reduce": "all_reduce",
}
SITE = "ansible-playbook site.yml"
STOP = "ansible-playbook playbooks/stop.yml"


@dataclass(frozen=True)
class Check:
    id: str
    status: Status
    subject: str  # "all", "node3", "node0 -> node3" or "node0 <-> node3"
    message: str
    remedy: str = ""


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

    @property
    def probed(self) -> list[Node]:
        return [node for node in self.nodes if node.document is not None]

    def address(self, name: str) -> str:
        return next((node.address for node in self.nodes if node.name == name), name)

    @property
    def documents(self) -> dict[str, Json]:
        return {node.name: node.document for node in self.nodes if node.document is not None}


# --- Reading ---


def read_evidence(text: str) -> Evidence:
    """From {"addresses": {node: address}, "trainer", "probe", "all_reduce": {node: result of the command},
    "rendezvous_port", "ephemeral_port", "link_speed" (Mbit/s)}.

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


# --- Small words ---


def join(names: Iterable[str]) -> str:
    *most, last = [*names] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


def count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def fine(check: str, message: str) -> list[Check]:
    return [Check(check, "ok", "all", message)]


def unknown(check: str, reason: str) -> list[Check]:
    remedy = "Mend what failed above and check again."
    return [Check(check, "warning", "all", f"not checked: {reason}", remedy)]


# --- Checks of single nodes ---


def check_answers(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.nodes:
        if node.complaint:
            # Ansible's sentence ends with ssh's own, which is the one that says something.
            said = last_line(node.complaint).rsplit("ssh: ", 1)[-1].removeprefix("Task failed: ")
            message = f"{node.name} ({node.address}): {said}"
            found.append(Check("answers", "failed", node.name, message, explain_ssh(node)))
    return found or fine("answers", count(len(evidence.nodes), "node"))


def explain_ssh(node: Node) -> str:
    """The remedy for what ssh said."""
    name, said = node.name, node.complaint.lower()
    bootstrap = f"ansible-playbook playbooks/bootstrap.yml --limit {name}"
    if "host key verification failed" in said or "identification has changed" in said:
        return f"The machine at {node.address} is not the {name} of before (installed anew?): {bootstrap}"
    if "permission denied" in said:
        return f"{name} does not know this project's key: {bootstrap}"
    if "refused" in said:
        return f"{name} is on, but its SSH server is not: at its keyboard, sudo systemctl enable --now ssh"
    if "timed out" in said or "no route" in said or "unreachable" in said:
        return f"Is {name} on? Are its cable's lights on at both ends? Is {node.address} still its address?"
    return f"Try it by hand: ansible {name} -m ansible.builtin.ping -vvv"


def check_trainer(evidence: Evidence) -> list[Check]:
    answering = [node for node in evidence.nodes if not node.complaint]
    missing = [node.name for node in answering if not node.trainer]
    if not answering:
        return unknown("trainer", "no node answers")
    if missing:
        remedy = SITE if len(missing) == len(evidence.nodes) else f"{SITE} --limit {','.join(missing)}"
        return [Check("trainer", "failed", ", ".join(missing), f"not installed on {join(missing)}", remedy)]
    return fine("trainer", count(len(answering), "node"))


def check_probe(evidence: Evidence) -> list[Check]:
    asked = [node for node in evidence.nodes if node.trainer]
    found = []
    for node in asked:
        if node.document is None:
            remedy = f"Its release may be damaged or older than these playbooks: {SITE}"
            found.append(Check("probe", "failed", node.name, f"{node.name}: {node.probe_error}", remedy))
        elif not node.document.get("complete"):
            message = f"{node.name}: did not finish in time; what it had found is below"
            remedy = f"Check again. If it stays: is {node.name} overloaded (top), or its network (ping)?"
            found.append(Check("probe", "failed", node.name, message, remedy))
    if not asked:
        return unknown("probe", "no node has the trainer")
    return found or fine("probe", count(len(asked), "node"))


def check_address(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.probed:
        if any(busy.get("reason") == "no address" for busy in node.busy_ports.values()):
            has = (node.about.get("addresses") or {}).values()
            mine = [one for addresses in has for one in addresses if not one.startswith("127.")]
            message = f"{node.name} does not have its address {node.address} (it has {join(mine)})"
            remedy = f"{SITE} gives it; or correct lan_address of {node.name} in the inventory"
            found.append(Check("address", "failed", node.name, message, remedy))
    return found or fine("address", ", ".join(f"{node.name} {node.address}" for node in evidence.probed))


def check_hostname(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.probed:
        hostname = node.about.get("hostname")
        if hostname and hostname != node.name:
            message = f"{node.name} calls itself {hostname}"
            remedy = f"ansible-playbook playbooks/bootstrap.yml --limit {node.name}"
            found.append(Check("hostname", "failed", node.name, message, remedy))
    return found or fine("hostname", "each node has its name of the inventory")


def check_names(evidence: Evidence) -> list[Check]:
    """A rank tells its peers the address that its own name resolves to: 127.x makes them call themselves."""
    found = []
    for node in evidence.probed:
        resolves: dict[str, list[str] | None] = node.about.get("resolves") or {}
        hostname = node.about.get("hostname") or node.name
        loopback = [one for one in resolves.get(hostname) or [] if one.startswith("127.")]
        if loopback and loopback != [node.address]:
            message = (
                f"on {node.name}, its own name {hostname} is {loopback[0]}: other ranks would call themselves"
            )
            remedy = f"{SITE} corrects /etc/hosts there (the line {loopback[0]} {hostname} must go)"
            found.append(Check("names", "failed", node.name, message, remedy))
            continue
        expected = {other.name: [other.address] for other in evidence.probed}
        wrong = [name for name in expected if name in resolves and resolves[name] != expected[name]]
        if wrong:
            said = "; ".join(f"{name} is {join(resolves[name] or ['unknown'])}" for name in wrong)
            remedy = f"{SITE} writes the names of all nodes into /etc/hosts"
            status: Status = "failed" if node.name in wrong else "warning"
            found.append(Check("names", status, node.name, f"on {node.name}, {said}", remedy))
    return found or fine("names", "every node's name is its LAN address, on every node")


def check_interface(evidence: Evidence) -> list[Check]:
    """Gloo and NCCL use one interface: the one that has the LAN address must be the way to every peer."""
    found = []
    for node in evidence.probed:
        own = node.about.get("interface")
        routes: dict[str, Json] = node.about.get("routes") or {}
        astray: dict[str, list[str]] = {}
        for peer, route in routes.items():
            if own and route.get("interface") and route["interface"] != own:
                astray.setdefault(route["interface"], []).append(peer)
        for interface, peers in astray.items():
            message = f"{node.name}'s address is on {own}, but it reaches {join(peers)} through {interface}"
            remedy = (
                f"Two ways to the same network (wireless as well as the cable?): on {node.name}, turn {interface} off"
                f" or give it another network; `ip route get {evidence.address(peers[0])}` must say {own}"
            )
            found.append(Check("interface", "failed", node.name, message, remedy))
    known = [
        f"{node.name} {node.about['interface']}" for node in evidence.probed if node.about.get("interface")
    ]
    return found or fine("interface", ", ".join(known) or "not told")


def check_link(evidence: Evidence) -> list[Check]:
    found = []
    known = []
    for node in evidence.probed:
        link = node.about.get("link") or {}
        speed, duplex, interface = link.get("speed_mbit"), link.get("duplex"), node.about.get("interface")
        if not speed or not link.get("physical"):
            continue  # a virtual interface tells a number that means nothing
        known.append(f"{node.name} {speed}")
        message = ""
        if speed < evidence.link_speed:
            message = (
                f"{node.name}: {interface} negotiated {speed} Mbit/s, {evidence.link_speed:.0f} expected"
            )
        elif duplex == "half":
            message = f"{node.name}: {interface} works in half duplex"
        if message:
            remedy = cable(node.name, interface, evidence.link_speed)
            found.append(Check("link", "failed", node.name, message, remedy))
    return found or fine(
        "link", ", ".join(known) + " Mbit/s" if known else "the interfaces do not tell (virtual)"
    )


def cable(name: str, interface: str | None, speed: float) -> str:
    """What to do about a link that is slower than it should be."""
    return (
        f"Replug {name}'s cable at both ends, then try another cable (all eight wires, Cat 5e or better) and another"
        f" port of the switch. On {name}, `cat /sys/class/net/{interface or 'INTERFACE'}/speed` must say {speed:.0f}"
    )


def check_rendezvous_port(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.probed:
        for name, busy in node.busy_ports.items():
            if busy.get("reason") == "no address":
                continue  # check_address says it
            port = evidence.rendezvous_port if name == "rendezvous" else evidence.ephemeral_port
            holder = busy.get("holder") or {}
            message = f"port {port} on {node.name} {describe_holder(busy, holder)}"
            status: Status = "failed"
            remedy = f"A run is active? {STOP}. Another program? Stop it, or choose another rendezvous_port"
            if name == "ephemeral":
                status, remedy = "warning", "Check again: another port will be drawn"
            elif (holder.get("unit") or "").startswith("aura-train@"):
                message += ": a run is active, which also slows down what is measured here"
                remedy = f"Stop it, then check again: {STOP}"
            found.append(Check("rendezvous_port", status, node.name, message, remedy))
    nodes = count(len(evidence.probed), "node")
    return found or fine("rendezvous_port", f"{evidence.rendezvous_port} on {nodes}")


def describe_holder(busy: Json, holder: Json) -> str:
    if busy.get("reason") != "in use":
        return f"cannot be listened on ({busy.get('reason')})"
    who = holder.get("command") or "a process"
    details = [f"pid {holder['pid']}"] if holder.get("pid") else []
    details += [str(holder["unit"])] if holder.get("unit") else []
    details += [f"user {holder['user']}"] if holder.get("user") else []
    return f"is in use by {who}" + (f" ({', '.join(details)})" if details else "")


# --- Checks of pairs ---


@dataclass(frozen=True)
class Blame:
    """What a set of bad pairs has in common. kind: all, node, into, out of, both ways, one way."""

    kind: str
    nodes: tuple[str, ...]
    pairs: frozenset[Pair]

    @property
    def subject(self) -> str:
        if self.kind == "all":
            return "all"
        return {"one way": " -> ", "both ways": " <-> "}.get(self.kind, "").join(self.nodes)


def blame(measured: set[Pair], bad: set[Pair]) -> list[Blame]:
    """The fewest culprits for the bad pairs: everything; a node (all of its pairs); a node's incoming or outgoing
    half; a pair; one direction of a pair. What one culprit explains is no evidence against another."""
    names = sorted({name for pair in measured for name in pair})
    if len(names) > 2 and measured and bad == measured:
        return [Blame("all", tuple(names), frozenset(bad))]
    found: list[Blame] = []
    unexplained = set(bad)
    clear = set(measured)  # pairs that no culprit explains yet
    shapes: list[tuple[str, Callable[[Pair, str], bool]]] = [
        ("node", lambda pair, name: name in pair),
        ("into", lambda pair, name: pair[1] == name),
        ("out of", lambda pair, name: pair[0] == name),
    ]
    for kind, belongs in shapes:
        by_badness = sorted(names, key=lambda name: -sum(belongs(pair, name) for pair in unexplained))
        for name in by_badness if len(names) > 2 else []:
            mine = {pair for pair in clear if belongs(pair, name)}
            peers = {other for pair in mine for other in pair if other != name}
            if len(peers) > 1 and mine <= unexplained:
                found.append(Blame(kind, (name,), frozenset(mine)))
                unexplained -= mine
                clear -= mine
    for caller, called in sorted(unexplained):
        if (called, caller) not in unexplained:
            found.append(Blame("one way", (caller, called), frozenset({(caller, called)})))
        elif caller < called:
            pairs = frozenset({(caller, called), (called, caller)})
            found.append(Blame("both ways", (caller, called), pairs))
    return found


def check_tcp(evidence: Evidence, which: str) -> list[Check]:
    """All ordered pairs on one of the two ports. Pairs that another check explains (the callee's port is taken, its
    probe did not run, an address is missing) are left out."""
    check = f"tcp_{which}"
    port = evidence.rendezvous_port if which == "rendezvous" else evidence.ephemeral_port
    if len(evidence.probed) < 2:
        return unknown(check, f"{count(len(evidence.probed), 'node')} could be probed")
    results = tcp_results(evidence, which)
    bad = {pair: result for pair, result in results.items() if not result.get("ok")}
    found = explain_strangers(evidence, check, bad, port)
    closed = {pair for pair, result in bad.items() if result.get("error") not in ("wrong node", "silent")}
    for culprit in blame({*results}, closed):
        said = Counter(str(bad[pair].get("detail")) for pair in culprit.pairs).most_common(1)[0][0]
        message, remedy = explain_closed(evidence, culprit, said)
        found.append(Check(check, "failed", culprit.subject, f"port {port}: {message}", remedy))
    return found or fine(check, f"{count_pairs(evidence, len(results))}, port {port}")


def count_pairs(evidence: Evidence, number: int) -> str:
    total = len(evidence.nodes) * (len(evidence.nodes) - 1)
    rest = "" if number == total else " (the others: see above)"
    return f"{number} of {count(total, 'ordered pair')}{rest}"


def tcp_results(evidence: Evidence, which: str) -> dict[Pair, Json]:
    found = {}
    for caller, document in evidence.documents.items():
        for called, reach in (document.get("tcp") or {}).items():
            peer = evidence.documents.get(called)
            result = reach.get(which) or {}
            if peer is None or which in peer.get("busy_ports", {}) or result.get("error") == "no address":
                continue
            found[caller, called] = result
    return found


def explain_strangers(evidence: Evidence, check: str, bad: dict[Pair, Json], port: int) -> list[Check]:
    """A wrong host or a wrong program answered."""
    wrong: dict[tuple[str, str], list[str]] = {}
    silent: dict[str, list[str]] = {}
    for (caller, called), result in bad.items():
        if result.get("error") == "wrong node":
            wrong.setdefault((called, str(result.get("detail"))), []).append(caller)
        elif result.get("error") == "silent":
            silent.setdefault(called, []).append(caller)
    found = []
    for (called, answered), callers in wrong.items():
        address = evidence.address(called)
        message = f"port {port}: at {address}, {answered} answered {join(callers)} instead of {called}"
        remedy = (
            f"Two machines have the address {address}, or the inventory mixes {called} and {answered} up:"
            f" compare `ip -br address` on both; {SITE} sets the addresses"
        )
        found.append(Check(check, "failed", called, message, remedy))
    for called, callers in silent.items():
        message = f"port {port}: something on {called} accepted {join(callers)} but is not the probe"
        remedy = f"On {called}: sudo ss -ltnp 'sport = :{port}' names the program; stop it"
        found.append(Check(check, "failed", called, message, remedy))
    return found


def explain_closed(evidence: Evidence, culprit: Blame, said: str) -> tuple[str, str]:
    """The message and the remedy for pairs that could not connect."""
    first, last = culprit.nodes[0], culprit.nodes[-1]
    at_first, at_last = evidence.address(first), evidence.address(last)
    firewall = f"on {last}, `sudo nft list table inet aura`; is another firewall active (sudo ufw status)?"
    match culprit.kind:
        case "all":
            return f"no node reaches any other ({said})", (
                f"Is the switch on, and are all nodes on it? A firewall on all of them? {SITE} writes the firewall anew"
            )
        case "node":
            return f"{first} and the others do not reach each other ({said})", (
                f"{first}'s cable or port of the switch, another address than {at_first}, or its firewall: {firewall}"
                f" {SITE} sets address and firewall right"
            )
        case "into":
            return f"nobody reaches {first}, though it reaches them ({said})", (
                f"{first}'s firewall stops what comes in: {SITE} --limit {first} writes it anew; {firewall}"
            )
        case "out of":
            return f"{first} reaches nobody, though they reach it ({said})", (
                f"Something on {first} stops what goes out: `sudo nft list ruleset` and `ip route` on {first};"
                f" or the others' firewalls do not know {at_first}: {SITE}"
            )
        case "both ways":
            return f"{first} and {last} do not reach each other ({said}); each reaches others", (
                f"Their firewalls may not know each other: {SITE}. Else a second machine has {at_first} or {at_last}:"
                f" unplug one of the two and ping its address"
            )
        case _:
            return f"{first} does not reach {last} ({said}), though {last} reaches {first}", (
                f"{last}'s firewall stops {first} ({at_first}), its list of peers may be old: {SITE} --limit {last};"
                f" {firewall}"
            )


def check_bandwidth(evidence: Evidence) -> list[Check]:
    if len(evidence.probed) < 2:
        return unknown("bandwidth", f"{count(len(evidence.probed), 'node')} could be probed")
    rates = bandwidths(evidence)
    found = explain_unmeasured(evidence)
    slow = {pair for pair, rate in rates.items() if rate < RATE_WARN * evidence.link_speed}
    for culprit in blame({*rates}, slow):
        bad = sorted(rates[pair] for pair in culprit.pairs)
        status: Status = "failed" if bad[0] < RATE_FAIL * evidence.link_speed else "warning"
        message, remedy = explain_slow(evidence, culprit, statistics.median(bad))
        found.append(Check("bandwidth", status, culprit.subject, message, remedy))
    if found:
        return found
    if not rates:
        return unknown("bandwidth", "no pair could be measured")
    spread = f"{min(rates.values()):.0f} to {max(rates.values()):.0f} Mbit/s"
    pairs = count_pairs(evidence, len(rates))
    return fine("bandwidth", f"{spread}, links of {evidence.link_speed:.0f}; {pairs}")


def bandwidths(evidence: Evidence) -> dict[Pair, float]:
    """Mbit/s of the ordered pairs that were measured."""
    return {
        (sender, receiver): float(result["mbit_per_second"])
        for sender, document in evidence.documents.items()
        for receiver, result in (document.get("bandwidth") or {}).items()
        if result.get("ok")
    }


def explain_unmeasured(evidence: Evidence) -> list[Check]:
    """Nodes that went away, and pairs that connected but moved no data. (Who does not reach the coordinator is left
    out, too; the TCP checks say that.)"""
    lost: dict[str, str] = {}
    for name, document in evidence.documents.items():
        lost |= {
            other: why for other, why in (document.get("lost") or {}).items() if other in evidence.documents
        }
        if document.get("left_out"):
            lost[name] = str(document["left_out"])
    reasons: dict[str, list[str]] = {}
    for name, reason in lost.items():
        if reaches_coordinator(evidence.documents[name]):
            reasons.setdefault(reason, []).append(name)
    remedy = "See the checks above; where they are good: was a node switched off or overloaded? Check again"
    found = [
        Check("bandwidth", "failed", ", ".join(names), f"{join(names)} not measured: {reason}", remedy)
        for reason, names in reasons.items()
    ]
    stalled = {
        (sender, receiver): str(result.get("error"))
        for sender, document in evidence.documents.items()
        for receiver, result in (document.get("bandwidth") or {}).items()
        if not result.get("ok") and receiver in evidence.documents and reaches(document, receiver)
        if not {sender, receiver} & {*lost}
    }
    for (sender, receiver), error in stalled.items():
        message = f"{sender} to {receiver}: connected, but not measured ({error})"
        remedy = (
            "Small packets pass and large ones do not? Compare the MTU on both (ip link); "
            f"try {sender}'s and {receiver}'s cables"
        )
        found.append(Check("bandwidth", "failed", f"{sender} -> {receiver}", message, remedy))
    return found


def reaches(document: Json, peer: str) -> bool:
    return any(result.get("ok") for result in (document.get("tcp") or {}).get(peer, {}).values())


def reaches_coordinator(document: Json) -> bool:
    return reaches(document, str(document.get("coordinator")))


def explain_slow(evidence: Evidence, culprit: Blame, rate: float) -> tuple[str, str]:
    """The message and the remedy for pairs that are slow; rate is their median in Mbit/s."""
    expected = f"about {0.94 * evidence.link_speed:.0f} expected"
    first, last = culprit.nodes[0], culprit.nodes[-1]
    about = next((node.about for node in evidence.nodes if node.name == first), {})
    remedy = cable(first, about.get("interface"), evidence.link_speed)
    hundred = 60 <= rate <= 100 < evidence.link_speed
    negotiated = "cable or port negotiated 100 Mbit/s"
    busy = "Was something else using the network or the processors? Check again when it is quiet."
    match culprit.kind:
        case "all":
            why = "A 100 Mbit/s switch?" if hundred else "A slow switch, or is lan_link_speed too high?"
            return f"{rate:.0f} Mbit/s between all nodes, {expected}", f"{why} {busy}"
        case "node":
            message = f"{first}: {rate:.0f} Mbit/s to and from every node, {expected}"
            return message, f"{first}'s {negotiated}: {remedy}" if hundred else f"{first}'s link. {remedy}"
        case "into" | "out of":
            way = "from" if culprit.kind == "into" else "to"
            message = f"{first}: {rate:.0f} Mbit/s {way} every node, the other way is good; {expected}"
            return message, f"A damaged pair of wires, or one end in half duplex. {remedy}"
        case "both ways":
            message = f"{first} and {last}: {rate:.0f} Mbit/s between them, {expected}"
            if len(evidence.probed) == 2:
                cause = f"{first}'s or {last}'s {negotiated}" if hundred else "One of the two links"
                return message, f"{cause}: {remedy}; the same for {last}"
            return message, f"Both are faster with others, so their own cables are good. {busy}"
        case _:
            return f"{first} to {last}: {rate:.0f} Mbit/s, {expected}; the other way is good", busy


# --- Checks across nodes ---


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


def check_clock(evidence: Evidence) -> list[Check]:
    offsets = clock_offsets(evidence)
    if len(offsets) < 2:
        return unknown("clock", "no two nodes compared their clocks")
    found = []
    for name, offset in offsets.items():
        if abs(offset) >= CLOCK_WARN:
            status: Status = "failed" if abs(offset) >= CLOCK_FAIL else "warning"
            way = "ahead of" if offset > 0 else "behind"
            remedy = f"On {name}: `chronyc tracking`, then `sudo chronyc makestep`; {SITE} sets chrony up"
            message = f"{name} is {abs(offset):.3g} s {way} the others"
            found.append(Check("clock", status, name, message, remedy))
    for name, document in evidence.documents.items():
        if name not in offsets and reaches_coordinator(document):
            remedy = "Check again."
            found.append(Check("clock", "warning", name, f"{name}'s clock was not compared", remedy))
    furthest = max(abs(offset) for offset in offsets.values())
    return found or fine("clock", f"within {furthest * 1000:.3g} ms of each other")


def odd_ones_out(values: dict[str, str | None]) -> tuple[str | None, dict[str, str | None]]:
    """The most common value (None never counts as common) and the nodes that have another."""
    told = Counter(value for value in values.values() if value is not None)
    if not told:
        return None, dict(values)
    common = told.most_common(1)[0][0]
    return common, {name: value for name, value in values.items() if value != common}


def check_release(evidence: Evidence) -> list[Check]:
    if not evidence.probed:
        return unknown("release", "no node could be probed")
    common, odd = odd_ones_out({node.name: node.about.get("release") for node in evidence.probed})
    if common is None:
        message = "no node runs a release (/opt/aura/current is missing)"
        return [Check("release", "failed", "all", message, SITE)]
    found = [
        Check("release", "failed", name, f"{name} runs release {value or 'none'}, the others {common}", SITE)
        for name, value in odd.items()
    ]
    return found or fine("release", f"{common} on {count(len(evidence.probed), 'node')}")


def check_versions(evidence: Evidence) -> list[Check]:
    if not evidence.probed:
        return unknown("versions", "no node could be probed")
    versions: dict[str, dict[str, str]] = {
        node.name: node.about.get("versions") or {} for node in evidence.probed
    }
    packages = sorted({package for told in versions.values() for package in told})
    found, same = [], []
    for package in packages:
        common, odd = odd_ones_out({name: told.get(package) for name, told in versions.items()})
        for name, value in odd.items():
            message = f"{name} has {package} {value or 'not at all'}, the others {common}"
            found.append(Check("versions", "failed", name, message, SITE))
        same.append(f"{package} {common}")
    return found or fine("versions", ", ".join(same))


def check_disk(evidence: Evidence) -> list[Check]:
    found, free = [], []
    for node in evidence.probed:
        disk = node.about.get("disk") or {}
        if "free_bytes" not in disk:
            continue
        free.append(disk["free_bytes"])
        if disk["free_bytes"] < DISK_WARN:
            status: Status = "failed" if disk["free_bytes"] < DISK_FAIL else "warning"
            message = f"{node.name} has {disk['free_bytes'] / 1e9:.1f} GB free in {disk['path']}"
            remedy = f"Delete old runs on {node.name} (sudo du -sh /var/lib/aura/runs/*)"
            found.append(Check("disk", status, node.name, message, remedy))
    return found or fine("disk", f"at least {min(free) / 1e9:.0f} GB on each node" if free else "not told")


def check_all_reduce(evidence: Evidence) -> list[Check]:
    ran = [node for node in evidence.nodes if node.reduced is not None]
    if not ran:
        return unknown("all_reduce", "it needs free ports and every node to reach every other one")
    found: list[Check] = []
    results = []
    for node in ran:
        reduced = node.reduced or {}
        line = re.search(r"all_reduce = (\S+) \(esperado (\S+)\) (OK|ERROR)", reduced["stdout"])
        if reduced["rc"] == 0 and line and line[3] == "OK":
            results.append(line[1])
            continue
        said = last_line(reduced["stderr"]) or last_line(reduced["stdout"]) or f"exit code {reduced['rc']}"
        remedy = (
            f"Where the TCP checks are good: do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name"
            f" {node.name}'s LAN interface ({node.about.get('interface')})? docs/troubleshooting.md, all_reduce"
        )
        found.append(Check("all_reduce", "failed", node.name, f"{node.name}: {said}", remedy))
    return found or fine("all_reduce", f"{count(len(ran), 'rank')}, result {results[0]} as expected on each")


CHECKS: dict[str, Callable[[Evidence], list[Check]]] = {
    "answers": check_answers,
    "trainer": check_trainer,
    "probe": check_probe,
    "address": check_address,
    "hostname": check_hostname,
    "names": check_names,
    "interface": check_interface,
    "link": check_link,
    "rendezvous_port": check_rendezvous_port,
    "tcp_rendezvous": lambda evidence: check_tcp(evidence, "rendezvous"),
    "tcp_ephemeral": lambda evidence: check_tcp(evidence, "ephemeral"),
    "bandwidth": check_bandwidth,
    "clock": check_clock,
    "release": check_release,
    "versions": check_versions,
    "disk": check_disk,
    "all_reduce": check_all_reduce,
}


def judge(evidence: Evidence) -> list[Check]:
    """All checks, in order. With no document at all, the checks that need one say so in one line each."""
    found: list[Check] = []
    for name, check in CHECKS.items():
        if not evidence.probed and name not in ("answers", "trainer", "probe"):
            found += unknown(name, "no node could be probed")
        else:
            found += check(evidence)
    return found


# --- Writing ---


def worst(checks: list[Check]) -> Status:
    statuses = {check.status for check in checks}
    return "failed" if "failed" in statuses else "warning" if "warning" in statuses else "ok"


def draw_matrix(evidence: Evidence) -> list[str]:
    """Mbit/s from each node (row) to each other one (column): 941, slow 640!, far too slow 94✗, not measured ?."""
    names = [node.name for node in evidence.nodes]
    rates = bandwidths(evidence)
    if not rates:
        return []

    def cell(sender: str, receiver: str) -> str:
        if sender == receiver:
            return "- "
        rate = rates.get((sender, receiver))
        if rate is None:
            return "? "
        if rate < RATE_FAIL * evidence.link_speed:
            return f"{rate:.0f}✗"
        return f"{rate:.0f}!" if rate < RATE_WARN * evidence.link_speed else f"{rate:.0f} "

    label = max(len("from \\ to"), *map(len, names))
    width = max(7, *(len(name) + 2 for name in names))
    head = "from \\ to".ljust(label) + "".join(f"{name} ".rjust(width) for name in names) + " Mbit/s"
    rows = [name.ljust(label) + "".join(cell(name, other).rjust(width) for other in names) for name in names]
    return [line.rstrip() for line in [head, *rows]]


def draw(evidence: Evidence, checks: list[Check]) -> list[str]:
    """The report for people. Checks that could not be made, all for the same reason, share one line."""
    margin = max(map(len, TITLES.values())) + 4
    lines: list[str] = []

    def write(text: str, first_indent: int, indent: int) -> None:
        lines.extend(
            textwrap.wrap(
                text,
                width=110,
                initial_indent=" " * first_indent,
                subsequent_indent=" " * indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )

    unmade: dict[str, list[str]] = {}
    for check in checks:
        if check.message.startswith("not checked: "):
            unmade.setdefault(check.message, []).append(TITLES[check.id])
            continue
        write(f"{MARKS[check.status]} {TITLES[check.id]:{margin - 4}}  {check.message}", 0, margin)
        if check.remedy:
            write(f"→ {check.remedy}", margin, margin + 2)
        if check is [other for other in checks if other.id == "bandwidth"][-1]:
            lines += [" " * margin + row for row in draw_matrix(evidence)]
    for message, titles in unmade.items():
        write(f"{MARKS['warning']} {', '.join(titles)}: {message}", 0, 2)
    lines.append(summarize(evidence, checks))
    return lines


def summarize(evidence: Evidence, checks: list[Check]) -> str:
    tally = Counter(check.status for check in checks)
    parts = [f"{count(tally['failed'], 'check')} failed"] if tally["failed"] else []
    parts += [count(tally["warning"], "warning")] if tally["warning"] else []
    parts += [f"{tally['ok']} ok" if parts else f"all {tally['ok']} checks ok"]
    return f"{count(len(evidence.nodes), 'node')}: {', '.join(parts)}"


def as_json(evidence: Evidence, checks: list[Check]) -> Json:
    rates, offsets = bandwidths(evidence), clock_offsets(evidence)
    names = [node.name for node in evidence.nodes]
    return {
        "schema": SCHEMA,
        "status": worst(checks),
        "nodes": names,
        "checks": [asdict(check) for check in checks],
        "bandwidth_mbit": {a: {b: rates.get((a, b)) for b in names if b != a} for a in names},
        "clock_offset_seconds": {name: offsets.get(name) for name in names},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judges what the nodes found out about their connectivity.")
    parser.add_argument("evidence", nargs="?", default="-", help="a file; - (default) is standard input")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the machine-readable result")
    given = parser.parse_args(argv)
    try:
        text = sys.stdin.read() if given.evidence == "-" else Path(given.evidence).read_text()
        evidence = read_evidence(text)
        checks = judge(evidence)
        if given.json:
            given.json.write_text(json.dumps(as_json(evidence, checks), indent=2) + "\n")
    except (OSError, ValueError, KeyError) as problem:
        print(f"The evidence could not be read, or the result not written: {problem!r}", file=sys.stderr)
        return 1
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # a C locale would refuse the marks
    print("\n".join(draw(evidence, checks)))
    return 2 if worst(checks) == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
