"""The checks that compare the nodes with each other."""

from __future__ import annotations

import re
from collections import Counter

from aura.check.connectivity.checks import SITE, Check, Status, count, fine, join, unknown
from aura.check.connectivity.evidence import Evidence, clock_offsets, last_line
from aura.check.connectivity.pairs import reaches_coordinator

CLOCK_WARN, CLOCK_FAIL = 0.1, 2.0  # seconds
DISK_WARN, DISK_FAIL = 5e9, 1e9  # bytes


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
            if name in evidence.wsl:
                remedy = (
                    f"Windows gives {name} the time. In PowerShell there: w32tm /resync; wsl --shutdown; "
                    "Start-ScheduledTask -TaskName 'Aura WSL'"
                )
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


def trainer_of(release: str | None) -> str | None:
    """'3f2a' of '3f2a-cu126-91bc': what is equal where nodes train the same way. The build of torch may differ."""
    return release.partition("-")[0] if release else None


def unlike_builds(releases: dict[str, str | None]) -> str:
    """', with unlike builds of torch: cpu on node0, cu126 on node1 and node2'; nothing where all are alike."""
    nodes_of: dict[str, list[str]] = {}
    for name, release in releases.items():
        nodes_of.setdefault((release or "").partition("-")[2].partition("-")[0], []).append(name)
    if len(nodes_of) < 2:
        return ""
    return ", with unlike builds of torch: " + ", ".join(
        f"{build} on {join(names)}" for build, names in nodes_of.items()
    )


def check_release(evidence: Evidence) -> list[Check]:
    releases: dict[str, str | None] = {node.name: node.about.get("release") for node in evidence.probed}
    common, odd = odd_ones_out({name: trainer_of(release) for name, release in releases.items()})
    if common is None:
        message = "no node runs a release (/opt/aura/current is missing)"
        return [Check("release", "failed", "all", message, SITE)]
    said = {name: f"{name} runs release {releases[name] or 'none'}, the others {common}" for name in odd}
    found = [Check("release", "failed", name, message, SITE) for name, message in said.items()]
    return found or fine(
        "release", f"{common} on {count(len(evidence.probed), 'node')}{unlike_builds(releases)}"
    )


def comparable(versions: dict[str, str]) -> dict[str, str]:
    """What has to be equal of these versions: of Python 3.11, of torch and of NCCL without their builds."""
    found = {}
    for package, version in versions.items():
        if package == "python":
            found[package] = ".".join(version.split(".")[:2])
        elif package == "torch":
            found[package] = version.partition("+")[0]
        else:
            found["NCCL" if package.startswith("nvidia-nccl") else package] = version
    return found


def check_versions(evidence: Evidence) -> list[Check]:
    versions: dict[str, dict[str, str]] = {
        node.name: comparable(node.about.get("versions") or {}) for node in evidence.probed
    }
    packages = sorted({package for told in versions.values() for package in told})
    found, same = [], []
    for package in packages:
        # A build of torch for processors has no NCCL; ranks that have none make all of them talk Gloo.
        asked = {name: told for name, told in versions.items() if package != "NCCL" or package in told}
        common, odd = odd_ones_out({name: told.get(package) for name, told in asked.items()})
        for name, value in odd.items():
            message = f"{name} has {package} {value or 'not at all'}, the others {common}"
            # Between PCs ranks talk gloo, unless somebody asks for NCCL.
            is_gloo = package == "NCCL"
            remedy = "-e backend=nccl needs one torch_backend on all nodes" if is_gloo else SITE
            found.append(Check("versions", "warning" if is_gloo else "failed", name, message, remedy))
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
