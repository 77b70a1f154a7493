"""What the tasks of playbooks/connectivity.yml have found, as one result: who is at fault, and what to do.

docs/decisions/0013-connectivity-in-tasks.md says why this is no Jinja. The sentences: playbooks/vars/connectivity.yml.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_low
from typing import Any

Node = Mapping[str, Any]  # its variables, with what the playbook's tasks have registered
Pair = tuple[str, str]  # who connects or sends, to whom
Finding = dict[str, str]  # id of its check, status (ok, warning, failed), subject, message, remedy
CLOCK_WARN, CLOCK_FAIL, CLOCK_BY_SSH = 0.1, 2.0, 5.0  # seconds; the last where SSH carries the time
RATE_WARN, RATE_FAIL = 0.8, 0.5  # of the link's speed; a healthy link gives 0.94
ARROWS = {"one way": " -> ", "stalled": " -> ", "both ways": " <-> ", "two nodes": " <-> "}


def connectivity_rounds(names: Sequence[str]) -> list[list[Pair]]:
    """Every pair once, in rounds of disjoint pairs (circle method): n rounds for odd n, n - 1 for even n."""
    circle: list[str | None] = [*names, None] if len(names) % 2 else [*names]
    found = []
    for _ in circle[1:]:
        pairs = [(circle[at], circle[-1 - at]) for at in range(len(circle) // 2)]
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def connectivity_mbit(printed: str) -> float:
    """What the receiver got, of what iperf3 --json has printed; 0 where nothing was measured."""
    try:
        return float(json.loads(printed)["end"]["sum_received"]["bits_per_second"]) / 1e6
    except (ValueError, KeyError, TypeError):
        return 0.0


def blame(measured: set[Pair], bad: set[Pair]) -> list[tuple[str, Pair, set[Pair]]]:
    """The fewest culprits for the bad pairs: all, a node, its incoming or outgoing half, a pair, one direction of it.
    What one of them explains is no evidence against another. A list of kind, names, pairs."""
    names = sorted({name for pair in measured for name in pair})
    if len(names) > 2 and bad == measured:
        return [("all", (names[0], names[-1]), bad)]
    found, clear = [], measured
    for kind, ends in (("node", (0, 1)), ("into", (1,)), ("out of", (0,))):
        of = {name: {pair for pair in measured if name in [pair[end] for end in ends]} for name in names}
        for name in sorted(names, key=lambda name: -len(of[name] & bad)):
            mine = of[name] & clear
            if len({other for pair in mine for other in pair}) > 2 and mine <= bad:
                found.append((kind, (name, name), mine))
                bad, clear = bad - mine, clear - mine
    for pair in sorted(bad):
        back = (pair[1], pair[0])
        if back not in bad:
            found.append(("one way", pair, {pair}))
        elif pair < back:
            found.append(("both ways" if len(names) > 2 else "two nodes", pair, {pair, back}))
    return found


def merge_problems(nodes: Sequence[Node]) -> Iterator[Finding]:
    """What each node has against itself. What is the same on several nodes is one finding."""
    keys = ("id", "status", "message", "remedy")
    of: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        for one in node["connectivity_problems"]:
            of.setdefault(tuple(one[key] for key in keys), []).append(node["inventory_hostname"])
    for values, names in of.items():
        one = dict(zip(keys, values, strict=True)) | {"subject": ", ".join(names)}
        remedy = one["remedy"].replace("{nodes}", ",".join(names))
        yield one | {"message": f"{one['subject']}: {one['message']}", "remedy": remedy}


class Comparison:
    """What is found by comparing the nodes with each other, and what is good where nothing is found."""

    def __init__(self, nodes: Sequence[Node], sentences: Mapping[str, Any], speed: float) -> None:
        self.nodes = {one["inventory_hostname"]: one for one in nodes if one.get("connectivity_node")}
        self.facts = {name: one["connectivity_node"] for name, one in self.nodes.items()}
        self.sentences, self.speed = sentences, speed
        self.pairs = f"of {len(nodes) * (len(nodes) - 1)} ordered pairs"
        self.found: list[Finding] = []
        self.good: dict[str, str] = {}
        self.rates: dict[Pair, float] = {}
        self.offsets: dict[str, float] = {}

    def add(self, check: str, case: str, subject: str, status: str, **values: Any) -> None:
        told = [text.format(subject=subject, **values) for text in self.sentences[check.split("_")[0]][case]]
        one = {"id": check, "status": status, "subject": subject}
        self.found.append(one | {"message": told[0], "remedy": told[1]})

    def add_pairs(self, check: str, kind: str, pair: Pair, status: str, **values: Any) -> None:
        first, last = pair
        subject = "all" if kind == "all" else ARROWS[kind].join(pair) if kind in ARROWS else first
        values |= {"first": first, "last": last, "address": self.nodes[first]["peer_address"]}
        values |= {"interface": self.facts[first]["interface"]}
        self.add(check, kind, subject, status, cable=self.sentences["cable"].format(**values), **values)

    def compare_ports(self, check: str, port: int) -> None:
        """Who could not listen is left out: another check says so."""
        heard = [name for name, node in self.nodes.items() if node["connectivity_server"].get("rc") == 0]
        tried = {
            (caller, one["item"][0]): "state" in one
            for caller, node in self.nodes.items()
            for one in node["connectivity_ports"].get("results", [])
            if int(one["item"][1]) == port and one["item"][0] in heard
        }
        for kind, pair, _ in blame({*tried}, {pair for pair, connects in tried.items() if not connects}):
            self.add_pairs(check, kind, pair, "failed", port=port)
        if tried:
            self.good[check] = f"{len(tried)} {self.pairs}, port {port}"

    def compare_bandwidths(self) -> None:
        for node in self.nodes.values():
            for one in node.get("connectivity_rates", []):
                pair = (one["item"]["from"], one["item"]["to"])
                if not {*pair} <= {*self.nodes}:
                    continue  # nothing else is known of one of them: another check says so
                if rate := connectivity_mbit(one["stdout"]):
                    self.rates[pair] = rate
                else:
                    self.add_pairs("bandwidth", "stalled", pair, "failed")
        slow = {pair for pair, rate in self.rates.items() if rate < RATE_WARN * self.speed}
        for kind, pair, pairs in blame({*self.rates}, slow):
            rate = median(self.rates[one] for one in pairs)
            status = "failed" if rate < RATE_FAIL * self.speed else "warning"
            hundred = " (100 Mbit/s negotiated?)" if 60 <= rate <= 100 < self.speed else ""
            self.add_pairs("bandwidth", kind, pair, status, rate=rate, hundred=hundred)
        if self.rates:
            spread = f"{min(self.rates.values()):.0f} to {max(self.rates.values()):.0f} Mbit/s"
            self.good["bandwidth"] = f"{spread}, links of {self.speed:.0f}; {len(self.rates)} {self.pairs}"

    def compare_clocks(self) -> None:
        """As chrony has measured against the other nodes, or as SSH carries the time where that is further off."""
        middle = median_low(facts["ahead"] for facts in self.facts.values())
        for name, facts in self.facts.items():
            by_ssh = facts["ahead"] - middle
            if abs(by_ssh) > CLOCK_BY_SSH or facts["offsets"]:
                self.offsets[name] = by_ssh if abs(by_ssh) > CLOCK_BY_SSH else median(facts["offsets"])
        for name, offset in self.offsets.items():
            way, seconds = "ahead of" if offset > 0 else "behind", abs(offset)
            if seconds >= CLOCK_WARN:
                status = "failed" if seconds >= CLOCK_FAIL else "warning"
                self.add("clock", self.facts[name]["time"], name, status, seconds=seconds, way=way)
        if len(self.offsets) > 1:
            self.good["clock"] = f"within {max(map(abs, self.offsets.values())) * 1000:.3g} ms of each other"

    def compare_versions(self) -> None:
        told = {name: facts["versions"] for name, facts in self.facts.items()}
        common = {}
        for package in sorted({package for versions in told.values() for package in versions}):
            # A build of torch for processors has no NCCL, which nobody needs between PCs.
            names = [name for name in told if package in told[name] or package != "NCCL"]
            has = {name: told[name].get(package) for name in names}
            common[package] = Counter(filter(None, has.values())).most_common(1)[0][0]
            case, status = ("NCCL", "warning") if package == "NCCL" else ("other", "failed")
            for name in [name for name in has if has[name] != common[package]]:
                values = {"package": package, "version": has[name] or "nowhere", "common": common[package]}
                self.add("versions", case, name, status, **values)
        self.good["versions"] = ", ".join(map(" ".join, common.items()))


def connectivity_report(
    nodes: Sequence[Node], checks: Mapping[str, Sequence[str]], sentences: Mapping[str, Any],
    ports: Sequence[int], speed: float,
) -> dict[str, Any]:  # fmt: skip
    """The result for programs (docs/troubleshooting.md). checks: title, and what is said where all is well.

    ports: of the rendezvous and of iperf3. speed: of the links, in Mbit/s.
    """
    compared = Comparison(nodes, sentences, speed)
    if compared.nodes:
        compared.compare_ports("tcp_rendezvous", int(ports[0]))
        compared.compare_ports("tcp_ephemeral", int(ports[1]))
        compared.compare_bandwidths()
        compared.compare_clocks()
        compared.compare_versions()
    known = [*merge_problems(nodes), *compared.found]
    found = []
    for check, (_, good) in checks.items():
        message = compared.good.get(check, good)
        one = {"id": check, "status": "ok" if message else "warning", "subject": "all"}
        one |= {"message": message or "not checked", "remedy": "" if message else sentences["unknown"]}
        found += [one for one in known if one["id"] == check] or [one]
    names = [node["inventory_hostname"] for node in nodes]
    return {
        "schema": 1,
        "status": max((one["status"] for one in found), key=["ok", "warning", "failed"].index),
        "nodes": names,
        "checks": found,
        "bandwidth_mbit": {a: {b: compared.rates.get((a, b)) for b in names if b != a} for a in names},
        "clock_offset_seconds": {name: compared.offsets.get(name) for name in names},
    }


class FilterModule:
    def filters(self) -> dict[str, object]:
        filters = (connectivity_mbit, connectivity_report, connectivity_rounds)
        return {one.__name__: one for one in filters}
