"""The report of playbooks/connectivity.yml, from hand-made documents of five nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from aura.check.connectivity.evidence import read_evidence
from aura.check.connectivity.report import CHECKS, draw
from judged_cluster import ALL_PAIRS, NAMES, PORTS, STALLED, Cluster, Json, Pairs, pairs_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_healthy_cluster(cluster: Cluster) -> None:
    checks = cluster.judge()
    assert [check.id for check in checks] == [*CHECKS]
    assert {check.status for check in checks} == {"ok"}
    assert not any(check.remedy for check in checks)
    lines = draw(read_evidence(cluster.text()), checks)
    assert lines[-1] == "5 nodes: all 17 checks ok"
    assert "20 of 20 ordered pairs" in "\n".join(lines)
    assert any(line.strip().startswith("node3") and line.count("941") == 4 for line in lines), "the matrix"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("connect to host 192.168.50.23 port 22: No route to host", "Is node3 on?"),
        ("connect to host 192.168.50.23 port 22: Connection timed out", "Is node3 on?"),
        ("connect to host 192.168.50.23 port 22: Connection refused", "its SSH server is not"),
        ("ubuntu@192.168.50.23: Permission denied (publickey).", "playbooks/bootstrap.yml -k -K --limit node3"),
        ("Host key verification failed.", "playbooks/bootstrap.yml -k -K --limit node3 (it says how to forget"),
    ],
)  # fmt: skip
def test_a_node_that_does_not_answer(cluster: Cluster, said: str, advice: str) -> None:
    message = f"Task failed: Data could not be sent to remote host. Make sure it can be reached over ssh: ssh: {said}"
    cluster.evidence["trainer"]["node3"] = {"unreachable": True, "msg": message}
    cluster.evidence["probe"]["node3"] = cluster.evidence["all_reduce"]["node3"] = {"skipped": True}
    for name in NAMES:
        for section in ("tcp", "bandwidth"):
            cluster.documents[name][section].pop("node3", None)
    cluster.only_this("answers", "node3", f"node3 (192.168.50.23): {said}", advice)


def test_a_node_that_dies_during_the_probe(cluster: Cluster) -> None:
    cluster.evidence["probe"]["node3"] = {"unreachable": True, "msg": "ssh: Connection timed out"}
    cluster.skip_all_reduce()
    for name in NAMES[:3]:
        cluster.documents[name]["bandwidth"]["node3"] = STALLED
    assert [check.id for check in cluster.bad()] == ["answers", "all_reduce"]


def test_the_trainer_is_nowhere(cluster: Cluster) -> None:
    for name in NAMES:
        cluster.evidence["trainer"][name] = {"changed": False, "rc": 1}
        cluster.evidence["probe"][name] = {"skipped": True}
    cluster.skip_all_reduce()
    checks = cluster.judge()
    assert [check.id for check in checks] == [*CHECKS]
    failed = [check for check in checks if check.status == "failed"]
    assert [(check.id, check.remedy) for check in failed] == [("trainer", "ansible-playbook site.yml")]
    lines = draw(read_evidence(cluster.text()), checks)
    assert len(lines) < 10, "what could not be checked shares one line"


def test_a_release_that_is_damaged_or_another(cluster: Cluster) -> None:
    traceback = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'aura'\n"
    cluster.evidence["probe"]["node2"] = {"rc": 1, "stdout": "", "stderr": traceback}
    cluster.skip_all_reduce()
    check = cluster.bad()[0]
    assert (check.id, check.subject) == ("probe", "node2")
    assert check.message == "node2: ModuleNotFoundError: No module named 'aura'"
    del cluster.evidence["probe"]["node2"]
    cluster.documents["node2"]["schema"] = 99  # another version's answer
    assert cluster.bad()[0].id == "probe"


NO_ADDRESS = {port: {"reason": "no address", "holder": None} for port in PORTS}


@pytest.mark.parametrize(
    ("about", "check_id", "said"),  # message, remedy[, status]
    [
        ({"hostname": "ubuntu"}, "hostname", ("node1 calls itself ubuntu", "site.yml --limit node1")),
        ({"resolves.node1": ["127.0.1.1"]}, "names", ("on node1, its own name node1 is 127.0.1.1", "/etc/hosts")),
        ({"resolves.node4": []}, "names", ("on node1, node4 is unknown", "", "warning")),
        ({"routes.node4": {"interface": "wlp3s0", "source": "192.168.50.90"}}, "interface",
         ("node1's address is on eno1, but it reaches node4 through wlp3s0", "192.168.50.24")),
        ({"link.speed_mbit": 100}, "link",
         ("node1: eno1 negotiated 100 Mbit/s, 1000 expected", "/sys/class/net/eno1/speed")),
        ({"link.duplex": "half"}, "link", ("half duplex", "another cable")),
        ({"release": "0ld-cu130-91bc"}, "release", ("node1 runs release 0ld-cu130-91bc, the others 3f2a", "site.yml")),
        ({"versions.torch": "2.12.1"}, "versions", ("node1 has torch 2.12.1, the others 2.13.0", "site.yml")),
        ({"disk.free_bytes": 0.4e9}, "disk", ("node1 has 0.4 GB free", "runs")),
        ({"addresses.eno1": ["192.168.50.131"]}, "address",
         ("does not have its address 192.168.50.21 (it has 192.168.50.131)", "site.yml")),
    ],
)  # fmt: skip
def test_one_node_is_different(cluster: Cluster, about: Json, check_id: str, said: tuple[str, ...]) -> None:
    for path, value in about.items():
        *sections, name = path.split(".")
        place = cluster.about("node1")
        for section in sections:
            place = place[section]
        place[name] = value
    if check_id == "address":
        cluster.documents["node1"]["busy_ports"] = NO_ADDRESS
        cluster.close([pair for pair in pairs_of("node1") if pair[0] == "node1"], "no address")
        cluster.close([pair for pair in pairs_of("node1") if pair[1] == "node1"])
    cluster.only_this(check_id, "node1", *said)


def test_unlike_builds_of_the_same_trainer_are_named_and_good(cluster: Cluster) -> None:
    cuda13 = {"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7"}
    cuda12 = {"torch": "2.13.0+cu126", "nvidia-nccl-cu12": "2.29.7"}
    for name in NAMES:
        cluster.about(name)["versions"] |= cuda13
    cluster.about("node1")["release"] = "3f2a-cpu-77de"
    cluster.about("node1")["versions"] = {"python": "3.11.2", "torch": "2.13.0+cpu"}
    cluster.about("node2")["release"] = "3f2a-cu126-5c01"
    cluster.about("node2")["versions"] = {"python": "3.11.7", **cuda12}
    said = {check.id: check for check in cluster.judge()}
    assert (said["release"].status, said["versions"].status) == ("ok", "ok")
    builds = "cu130 on node0, node3 and node4, cpu on node1, cu126 on node2"
    assert said["release"].message == f"3f2a on 5 nodes, with unlike builds of torch: {builds}"
    assert "torch 2.13.0" in said["versions"].message

    cluster.about("node2")["versions"]["nvidia-nccl-cu12"] = "2.27.3"
    cluster.only_this("versions", "node2", "node2 has NCCL 2.27.3, the others 2.29.7", status="warning")


@pytest.mark.parametrize(
    ("holder", "message", "remedy"),
    [
        ({"pid": 812, "command": "python", "unit": "aura-train@0.service", "user": "aura"},
         "port 12355 on node0 is in use by python (pid 812, aura-train@0.service, user aura): a run is active",
         "Stop it, then check again: ansible-playbook playbooks/stop.yml"),
        ({"pid": None, "command": None, "unit": None, "user": "root"}, "by a process (user root)", "stop.yml"),
        (None, "is in use by a process", "rendezvous_port"),
    ],
)  # fmt: skip
def test_the_rendezvous_port_is_taken(
    cluster: Cluster, holder: Json | None, message: str, remedy: str
) -> None:
    cluster.documents["node0"]["busy_ports"] = {"rendezvous": {"reason": "in use", "holder": holder}}
    cluster.close([pair for pair in ALL_PAIRS if pair[1] == "node0"], "silent", ["rendezvous"])
    cluster.only_this("rendezvous_port", "node0", message, remedy)


def test_a_firewall_that_stops_one_peer(cluster: Cluster) -> None:
    cluster.close([("node1", "node3")])
    bad = cluster.bad()
    assert [check.id for check in bad] == ["tcp_rendezvous", "tcp_ephemeral"]
    assert {check.subject for check in bad} == {"node1 -> node3"}
    assert "port 12355: node1 does not reach node3 (no answer), though node3 reaches node1" in bad[0].message
    assert "node3's firewall stops node1 (192.168.50.21)" in bad[0].remedy


INTO_NODE3, OUT_OF_NODE3 = ([pair for pair in ALL_PAIRS if pair[end] == "node3"] for end in (1, 0))


@pytest.mark.parametrize(
    ("pairs", "subjects", "message", "remedy"),
    [
        (pairs_of("node3"), ["node3"], "node3 and the others do not reach each other", "cable or port"),
        (INTO_NODE3, ["node3"], "nobody reaches node3", "stops what comes in"),
        (OUT_OF_NODE3, ["node3"], "node3 reaches nobody", "what goes out"),
        ([("node1", "node3"), ("node3", "node1")], ["node1 <-> node3"], "do not reach each other", "second machine"),
        ([*INTO_NODE3, ("node3", "node1")], ["node3", "node3 -> node1"], "nobody reaches node3", ""),
        (ALL_PAIRS, ["all"], "no node reaches any other", "Is the switch on"),
    ],
)  # fmt: skip
def test_who_is_to_blame_for_closed_pairs(
    cluster: Cluster, pairs: Pairs, subjects: list[str], message: str, remedy: str
) -> None:
    cluster.close(pairs, ports=["ephemeral"])
    bad = cluster.bad()
    assert [(check.id, check.subject) for check in bad] == [("tcp_ephemeral", one) for one in subjects]
    assert message in bad[0].message and remedy in bad[0].remedy


def test_the_wrong_host_answers(cluster: Cluster) -> None:
    wrong = {"ok": False, "error": "wrong node", "detail": "node4"}
    for name in ("node0", "node1"):
        cluster.documents[name]["tcp"]["node3"]["ephemeral"] = wrong
    message = "port 51234: at 192.168.50.23, node4 answered node0 and node1 instead of node3"
    cluster.only_this("tcp_ephemeral", "node3", message, "Two machines have the address 192.168.50.23")


def test_a_cable_that_negotiated_100_mbit(cluster: Cluster) -> None:
    cluster.rate(pairs_of("node3"), 94.1)
    message = "node3: 94 Mbit/s to and from every node, about 940 expected"
    remedy = "node3's cable or port negotiated 100 Mbit/s: Replug node3's cable"
    cluster.only_this("bandwidth", "node3", message, remedy)
    lines = draw(read_evidence(cluster.text()), cluster.judge())
    (row,) = [line.split() for line in lines if line.split()[:1] == ["node3"]]
    assert row == ["node3", "94✗", "94✗", "94✗", "-", "94✗"]


@pytest.mark.parametrize(
    ("pairs", "mbit", "found", "message", "remedy"),
    [
        (pairs_of("node1", "node3"), 94.1, [("failed", "node1"), ("failed", "node3")], "", ""),
        (OUT_OF_NODE3, 310, [("failed", "node3")],
         "node3: 310 Mbit/s to every node, the other way is good; about 940 expected", "half duplex"),
        ([("node0", "node1")], 700, [("warning", "node0 -> node1")], "", ""),
        (ALL_PAIRS, 94, [("failed", "all")], "", "A 100 Mbit/s switch?"),
    ],
    ids=["two nodes", "one direction", "a little", "all"],
)  # fmt: skip
def test_who_is_to_blame_for_slow_pairs(
    cluster: Cluster, pairs: Pairs, mbit: float, found: list[tuple[str, str]], message: str, remedy: str
) -> None:
    cluster.rate(pairs, mbit)
    bad = cluster.bad()
    assert [(check.status, check.subject) for check in bad] == found
    assert message in bad[0].message and remedy in bad[0].remedy


def test_the_inventory_says_how_fast_the_links_are(cluster: Cluster) -> None:
    cluster.evidence["link_speed"] = 2500
    for name in NAMES:
        cluster.about(name)["link"] = {"speed_mbit": 2500, "duplex": "full"}
    assert cluster.only().status == "failed"  # 941 of 2500
    cluster.rate(ALL_PAIRS, 2350)
    assert cluster.bad() == []


def test_small_packets_pass_and_large_ones_do_not(cluster: Cluster) -> None:
    cluster.documents["node1"]["bandwidth"]["node2"] = STALLED
    cluster.only_this("bandwidth", "node1 -> node2", remedy="MTU")


def test_a_node_that_leaves_the_measurement(cluster: Cluster) -> None:
    cluster.documents["node0"]["lost"] = {"node2": "left during the measurement (timed out)"}
    cluster.documents["node2"]["left_out"] = "the coordinator went away in the middle (timed out)"
    cluster.only_this("bandwidth", "node2")


def test_who_does_not_reach_the_coordinator_fails_once(cluster: Cluster) -> None:
    """Not in the measurement, no clock compared: consequences, which are not listed as failures of their own."""
    cluster.close([("node0", "node2"), ("node2", "node0")])
    cluster.skip_all_reduce()
    cluster.documents["node2"].update(clock={"ok": False, "error": "node0 does not answer"}, bandwidth={})
    cluster.documents["node2"]["left_out"] = "node0 does not answer"
    cluster.documents["node0"]["lost"] = {"node2": "did not come to the measurement"}
    for name in NAMES:
        cluster.documents[name]["bandwidth"].pop("node2", None)
    bad = cluster.bad()
    assert [check.id for check in bad] == ["tcp_rendezvous", "tcp_ephemeral", "all_reduce"]
    assert bad[-1].status == "warning"


def test_with_two_nodes_both_are_named(cluster: Cluster) -> None:
    """Whose cable it is cannot be told from one pair."""
    for name in NAMES[2:]:
        for task in ("addresses", "trainer", "all_reduce"):
            del cluster.evidence[task][name]
        del cluster.documents[name]
    cluster.rate([("node0", "node1"), ("node1", "node0")], 94)
    remedy = "node0's or node1's cable or port negotiated 100 Mbit/s"
    cluster.only_this("bandwidth", "node0 <-> node1", remedy=remedy)


def test_a_wrong_clock(cluster: Cluster) -> None:
    clock = cluster.documents["node3"]["clock"]
    clock["offset_seconds"] = 0.05
    assert cluster.bad() == []
    clock["offset_seconds"] = -0.3
    cluster.only_this("clock", "node3", "behind", "chronyc", "warning")
    clock["offset_seconds"] = 3.2
    cluster.only_this("clock", "node3", "ahead of", "chronyc")


def test_the_wrong_clock_is_the_coordinators(cluster: Cluster) -> None:
    """Everybody differs from node0 by the same: node0 is named, not the four others."""
    for name in NAMES[1:]:
        cluster.documents[name]["clock"]["offset_seconds"] = 3600.0
    cluster.only_this("clock", "node0", "behind the others")


def test_all_reduce_goes_wrong(cluster: Cluster) -> None:
    said = "All 5 of 5 ranks came within 60 s, but too late."
    cluster.evidence["all_reduce"]["node4"] = {"rc": 1, "stdout": "", "stderr": f"noise\n{said}\n"}
    cluster.only_this("all_reduce", "node4", f"node4: {said}", "GLOO_SOCKET_IFNAME")
    assert "eno1" in cluster.only().remedy
    # Exit code 0 without the line is not enough.
    cluster.evidence["all_reduce"]["node4"] = {"rc": 0, "stdout": "", "stderr": ""}
    cluster.only_this("all_reduce", "node4")


def call(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "aura.commands.connectivity", *options]
    environment = {"LC_ALL": "C", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "training")}
    return subprocess.run(
        command, input=text, capture_output=True, encoding="utf-8", env=environment, timeout=20, check=False
    )


def test_the_command_says_what_failed(cluster: Cluster, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = call(cluster.text(), "--json", str(result))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("✓ answers over SSH   5 nodes\n")
    assert json.loads(result.read_text())["status"] == "ok"

    cluster.rate(pairs_of("node3"), 94.1)
    done = call(cluster.text(), "--json", str(result))
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "5 nodes: 1 check failed, 16 ok"
    written = json.loads(result.read_text())
    assert written["status"] == "failed" and written["schema"] == 1
    assert [check["id"] for check in written["checks"]] == [*CHECKS]
    (failed,) = [check for check in written["checks"] if check["status"] == "failed"]
    assert failed.keys() == {"id", "status", "subject", "message", "remedy"} and failed["subject"] == "node3"
    assert written["bandwidth_mbit"]["node0"] == dict.fromkeys(NAMES[1:], 941.0) | {"node3": 94.1}

    cluster.rate(ALL_PAIRS, 941.0)
    cluster.rate([("node0", "node1")], 700)  # a warning is no failure
    done = call(cluster.text())
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "5 nodes: 1 warning, 16 ok")


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_what_cannot_be_read_is_neither_good_nor_bad(text: str) -> None:
    done = call(text)
    assert done.returncode == 1
    assert done.stderr.startswith("The evidence could not be read")


def test_every_check_is_explained_in_the_documentation() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    for check, (title, _) in CHECKS.items():
        assert f"### {title}" in text and f"`{check}`" in text, f"{check} is not explained"


def test_what_is_not_seen_from_wsl_is_said(cluster: Cluster) -> None:
    """Its virtual card tells 10 Gbit/s, whatever the cable; where it is right, the sentence stays."""
    cluster.evidence["wsl"] = ["node3"]
    cluster.about("node3")["link"] = {"speed_mbit": 10000, "duplex": "full", "physical": True}
    message = "whether Windows falls asleep, is not seen from here"
    cluster.only_this("link", "node3", message, "playbooks/windows.yml --limit node3", "warning")


def test_the_clock_and_the_address_of_wsl_are_those_of_windows(cluster: Cluster) -> None:
    cluster.evidence["wsl"] = ["node3"]
    cluster.documents["node3"]["clock"]["offset_seconds"] = 3600.0  # Windows slept
    cluster.documents["node3"]["busy_ports"] = NO_ADDRESS
    remedies = {check.id: check.remedy for check in cluster.bad() if check.subject == "node3"}
    assert "w32tm /resync" in remedies["clock"]
    assert "chronyc" not in remedies["clock"]
    assert "playbooks/windows.yml" in remedies["address"]
