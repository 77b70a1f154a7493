"""The checks of ordered pairs of nodes: TCP and bandwidth."""

from __future__ import annotations

import statistics
from collections import Counter

from aura.check.connectivity.blame import Blame, blame
from aura.check.connectivity.checks import SITE, Check, Status, count, fine, join, unknown
from aura.check.connectivity.evidence import Evidence, Json, Pair, bandwidths
from aura.check.connectivity.nodes import cable

RATE_WARN, RATE_FAIL = 0.8, 0.5  # of the link's speed; a healthy link gives 0.94


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
