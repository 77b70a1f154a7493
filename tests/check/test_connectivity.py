"""The report of playbooks/connectivity.yml, from what its tasks register on five nodes, one of them spoilt."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded
from plays import played, plays_of

Pairs = Iterable[tuple[str, str]]
NAMES = [f"node{number}" for number in range(5)]
ADDRESSES = {name: f"192.168.50.{20 + number}" for number, name in enumerate(NAMES)}
PORTS = {"tcp_rendezvous": 12355, "tcp_ephemeral": 5201}
ALL_PAIRS = [*permutations(NAMES, 2)]
PLAY = loaded("playbooks/connectivity.yml")[-1]
EXPRESSIONS = {**loaded("playbooks/vars/connectivity.yml"), **PLAY["vars"]}
rounds = tree.plugin("filter/connectivity").connectivity_rounds


def pairs_of(*names: str) -> list[tuple[str, str]]:
    return [pair for pair in ALL_PAIRS if {*names} & {*pair}]


def healthy(name: str) -> dict[str, Any]:
    """A node's variables, with what the tasks have registered."""
    others = [other for other in NAMES if other != name]
    here = {
        "ahead": 0.4, "hostname": name, "interface": "eno1", "addresses": [ADDRESSES[name]], "speed": 1000,
        "duplex": "full", "free": 400e9, "names": {}, "astray": {}, "time": "chrony", "offsets": [4e-4] * 4,
        "versions": {"python": "3.11", "torch": "2.13.0", "release": "3f2a"},
    }  # fmt: skip
    return {
        "inventory_hostname": name,
        "lan_address": ADDRESSES[name],
        "peer_address": ADDRESSES[name],
        "rendezvous_port": 12355,
        "groups": {"cluster": NAMES},
        "ansible_play_hosts_all": NAMES,
        "connectivity_trainer": {"rc": 0},
        "connectivity_facts": {"rc": 0},
        "connectivity_node": here,
        "connectivity_server": {"rc": 0, "stdout": ""},
        "connectivity_strangers": {"rc": 0, "stdout": ""},
        "connectivity_ports": {
            "results": [{"item": [other, port], "state": "started"} for other in others for port in PORTS.values()]
        },
        "connectivity_rates": [
            {"item": {"other": other, "from": sender, "to": receiver}, "stdout": iperf3(941)}
            for other in others if name < other
            for sender, receiver in ((name, other), (other, name))
        ],
        "connectivity_all_reduce": {
            "rc": 0, "stdout": "[Rank 0/5 | Node x | Device cpu] Backend=gloo | all_reduce = 15 (esperado 15) OK",
        },
    }  # fmt: skip


def iperf3(mbit: float) -> str:
    if not mbit:
        return json.dumps({"start": {}, "end": {}, "error": "unable to receive results"})
    return json.dumps({"end": {"sum_received": {"bits_per_second": mbit * 1e6}}})


class Cluster:
    def __init__(self) -> None:
        self.nodes = {name: healthy(name) for name in NAMES}
        self.settings: dict[str, Any] = {}

    def here(self, name: str) -> dict[str, Any]:
        here: dict[str, Any] = self.nodes[name]["connectivity_node"]
        return here

    def close(self, pairs: Pairs, *checks: str) -> None:
        ports = [PORTS[check] for check in checks or PORTS]
        for caller, called in pairs:
            for one in self.nodes[caller]["connectivity_ports"]["results"]:
                if one["item"][0] == called and one["item"][1] in ports:
                    one.pop("state", None)

    def rate(self, pairs: Pairs, mbit: float) -> None:
        for node in self.nodes.values():
            for one in node["connectivity_rates"]:
                if (one["item"]["from"], one["item"]["to"]) in pairs:
                    one["stdout"] = iperf3(mbit)

    def lose(self, name: str, said: str) -> None:
        """It is off from the first task on."""
        node = {key: value for key, value in self.nodes[name].items() if not key.startswith("connectivity_")}
        self.nodes[name] = node | {"connectivity_trainer": {"unreachable": True, "msg": said}}
        for node in self.nodes.values():
            tried = node.get("connectivity_ports", {"results": []})
            tried["results"] = [one for one in tried["results"] if one["item"][0] != name]
        self.unmeasure(name)

    def unmeasure(self, name: str) -> None:
        for node in self.nodes.values():
            rates = node.get("connectivity_rates", [])
            node["connectivity_rates"] = [
                one for one in rates if name not in (one["item"]["from"], one["item"]["to"])
            ]

    def result(self) -> dict[str, Any]:
        """As the playbook's two last tasks but the report make it."""
        hostvars = {name: dict(node) for name, node in self.nodes.items()}
        task = {one["name"]: one.get("ansible.builtin.set_fact") for one in PLAY["tasks"]}
        for name, node in hostvars.items():
            known = EXPRESSIONS | node | {"hostvars": hostvars} | self.settings
            problems = task["Collect what is wrong with each node"]["connectivity_problems"]
            hostvars[name]["connectivity_problems"] = filled_in(problems, known)
        known = EXPRESSIONS | hostvars["node0"] | {"hostvars": hostvars} | self.settings
        found: dict[str, Any] = filled_in(
            task["Compare the results with what training needs"]["connectivity_result"], known
        )
        return found

    def bad(self) -> list[dict[str, str]]:
        return [one for one in self.result()["checks"] if one["status"] != "ok"]

    def only(self) -> dict[str, str]:
        """What is wrong; beside it an all-reduce may not have been tried."""
        bad = self.bad()
        assert (
            len([one for one in bad if one["message"] != "not checked" or one["id"] != "all_reduce"]) == 1
        ), bad
        assert bad[0]["remedy"] and "{" not in bad[0]["message"] + bad[0]["remedy"]
        return bad[0]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_healthy_cluster(cluster: Cluster) -> None:
    result = cluster.result()
    assert result["status"] == "ok", cluster.bad()
    assert [one["id"] for one in result["checks"]] == [*EXPRESSIONS["connectivity_checks"]]
    assert not any(one["remedy"] for one in result["checks"])
    said = {one["id"]: one["message"] for one in result["checks"]}
    assert said["bandwidth"] == "941 to 941 Mbit/s, links of 1000; 20 of 20 ordered pairs"
    assert said["clock"] == "within 0.4 ms of each other"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("connect to host 192.168.50.23 port 22: No route to host", "Is it on?"),
        ("connect to host 192.168.50.23 port 22: Connection timed out", "Is it on?"),
        ("connect to host 192.168.50.23 port 22: Connection refused", "its SSH server is not"),
        ("ubuntu@192.168.50.23: Permission denied (publickey).", "playbooks/bootstrap.yml -k -K --limit node3"),
        ("Host key verification failed.", "playbooks/bootstrap.yml -k -K --limit node3 (it says how to forget"),
        ("kex_exchange_identification: read", "ansible node3 -m"),
    ],
)  # fmt: skip
def test_a_node_that_does_not_answer(cluster: Cluster, said: str, remedy: str) -> None:
    cluster.lose("node3", f"Task failed: Data could not be sent to remote host: ssh: {said}")
    found = cluster.only()
    assert (found["id"], found["subject"], found["status"]) == ("answers", "node3", "failed")
    assert found["message"] == f"node3: {said} (192.168.50.23)"
    assert remedy in found["remedy"]


def test_a_node_that_goes_away_in_the_middle(cluster: Cluster) -> None:
    cluster.nodes["node3"]["connectivity_ports"] = {"unreachable": True, "msg": "ssh: Connection timed out"}
    cluster.close([pair for pair in ALL_PAIRS if pair[1] == "node3"])
    for node in cluster.nodes.values():
        node["connectivity_all_reduce"] = {"skipped": True}
    found = cluster.bad()
    assert (found[0]["id"], found[0]["subject"]) == ("answers", "node3")
    assert {one["subject"] for one in found if one["id"].startswith("tcp")} == {"node3"}
    assert found[-1]["message"] == "not checked"


def test_the_trainer_is_nowhere(cluster: Cluster) -> None:
    for name, node in cluster.nodes.items():
        cluster.lose(name, "")
        node = cluster.nodes[name]
        node["connectivity_trainer"] = {"rc": 1}
    failed, *unknown = cluster.bad()
    assert failed["message"] == "node0, node1, node2, node3, node4: the trainer is not installed"
    assert failed["remedy"].startswith("ansible-playbook site.yml")
    assert {one["message"] for one in unknown} == {"not checked"}
    assert len(unknown) == len(EXPRESSIONS["connectivity_checks"]) - 2


@pytest.mark.parametrize(
    ("here", "said"),  # id, message, remedy[, status]
    [
        ({"hostname": "ubuntu"}, ("hostname", "node1 calls itself ubuntu", "site.yml --limit node1")),
        ({"names": {"node1": "127.0.1.1"}}, ("names", "node1: there node1 is 127.0.1.1", "/etc/hosts")),
        ({"names": {"node4": "unknown"}}, ("names", "node1: there node4 is unknown", "", "warning")),
        ({"astray": {"node4": "wlp3s0"}},
         ("interface", "its address is on eno1, but it reaches node4 through wlp3s0", "turn off wlp3s0")),
        ({"speed": 100}, ("link", "node1: eno1 negotiated 100 Mbit/s, full duplex; 1000", "/sys/class/net/eno1/speed")),
        ({"duplex": "half"}, ("link", "half duplex", "Replug node1's cable")),
        ({"versions": {"python": "3.11", "torch": "2.13.0", "release": "0ld"}},
         ("versions", "node1 has release 0ld, the others 3f2a", "site.yml")),
        ({"versions": {"python": "3.11", "release": "3f2a"}},
         ("versions", "node1 has torch nowhere, the others 2.13.0", "site.yml")),
        ({"free": 0.4e9}, ("disk", "node1: 0.4 GB free", "runs")),
        ({"free": 4e9}, ("disk", "node1: 4.0 GB free", "runs", "warning")),
        ({"offsets": [-0.3, -0.3, -0.2, 9]}, ("clock", "node1 is 0.25 s behind the others", "chronyc", "warning")),
        ({"offsets": [3.2, 3.2, 3.2]}, ("clock", "node1 is 3.2 s ahead of the others", "chronyc")),
        ({"ahead": 3600.9}, ("clock", "node1 is 3.6e+03 s ahead of the others", "chronyc")),
        ({"offsets": []}, ("clock", "node1: chrony compares its clock with no other", "systemctl status", "warning")),
    ],
)  # fmt: skip
def test_one_node_is_different(cluster: Cluster, here: dict[str, Any], said: tuple[str, ...]) -> None:
    cluster.here("node1").update(here)
    check, message, remedy, status = (*said, "failed")[:4]
    found = cluster.only()
    assert (found["id"], found["subject"], found["status"]) == (check, "node1", status)
    assert message in found["message"] and remedy in found["remedy"]


@pytest.mark.parametrize(
    ("task", "registered", "said"),  # id, message, remedy
    [
        ("trainer", {"rc": 2}, ("trainer", "node1: iperf3 is not installed", "site.yml --limit node1")),
        ("facts", {"rc": 1, "stderr_lines": ["noise", "df: no such file"]},
         ("trainer", "node1: its release may be damaged: df: no such file", "site.yml --limit node1")),
        ("strangers", {"stdout": "at …", "stdout_lines": ["at 192.168.50.23 the card aa:bb answers"]},
         ("address", "node1: at 192.168.50.23 the card aa:bb answers", "Two machines have this address")),
        ("server", {"rc": 1, "stdout": "12355: python 812 aura-train@0.service"},
         ("rendezvous_port", "node1: in use there: 12355: python 812 aura-train@0.service", "playbooks/stop.yml")),
        ("server", {"rc": 1, "stdout": "5201: iperf3 99 -"}, ("rendezvous_port", "in use there", "connectivity_port=")),
        ("server", {"rc": 1, "stdout": "", "stderr_lines": ["Failed to start"]},
         ("rendezvous_port", "iperf3 does not start there: Failed to start", "")),
        ("all_reduce", {"rc": 1, "stdout_lines": [], "stderr_lines": ["x", "All 5 ranks came, but too late."]},
         ("all_reduce", "node1: All 5 ranks came, but too late.", "GLOO_SOCKET_IFNAME")),
        # Exit code 0 without the line is not enough.
        ("all_reduce", {"rc": 0, "stdout": "", "stdout_lines": [], "stderr_lines": []},
         ("all_reduce", "node1: exit code 0", "eno1")),
    ],
)  # fmt: skip
def test_a_task_goes_wrong_on_one_node(
    cluster: Cluster, task: str, registered: dict[str, Any], said: tuple[str, str, str]
) -> None:
    cluster.nodes["node1"][f"connectivity_{task}"] = registered
    if task in ("trainer", "facts"):
        del cluster.nodes["node1"]["connectivity_node"]
        cluster.close(pairs_of("node1"))
        cluster.unmeasure("node1")
    found = cluster.only()
    assert (found["id"], found["subject"], found["status"]) == (said[0], "node1", "failed")
    assert said[1] in found["message"] and said[2] in found["remedy"]


def test_an_address_that_the_node_does_not_have(cluster: Cluster) -> None:
    cluster.here("node1")["addresses"] = ["192.168.50.131"]
    cluster.nodes["node1"]["connectivity_server"] = {"rc": 1, "stdout": "", "stderr_lines": []}
    found = cluster.only()
    assert found["message"] == "node1: it has 192.168.50.131 in place of its 192.168.50.21"
    assert "site.yml" in found["remedy"]


INTO, OUT_OF = ([pair for pair in ALL_PAIRS if pair[end] == "node3"] for end in (1, 0))


@pytest.mark.parametrize(
    ("pairs", "subjects", "message", "remedy"),
    [
        (pairs_of("node3"), ["node3"], "node3 and the others do not reach each other", "cable or port"),
        (INTO, ["node3"], "nobody reaches node3", "stops what comes in"),
        (OUT_OF, ["node3"], "node3 reaches nobody", "what goes out"),
        ([("node1", "node3"), ("node3", "node1")], ["node1 <-> node3"], "node1 and node3 do not reach each other",
         "second machine"),
        ([("node1", "node3")], ["node1 -> node3"], "node1 does not reach node3, though node3 reaches node1",
         "node3's firewall stops node1 (192.168.50.21)"),
        ([*INTO, ("node3", "node1")], ["node3", "node3 -> node1"], "nobody reaches node3", ""),
        (ALL_PAIRS, ["all"], "no node reaches any other", "Is the switch on"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("check", PORTS)
def test_who_is_to_blame_for_closed_ports(
    cluster: Cluster, check: str, pairs: Pairs, subjects: list[str], message: str, remedy: str
) -> None:
    cluster.close(pairs, check)
    bad = cluster.bad()
    assert [(one["id"], one["subject"]) for one in bad[: len(subjects)]] == [(check, one) for one in subjects]
    assert f"port {PORTS[check]}: {message}" in bad[0]["message"] and remedy in bad[0]["remedy"]
    # Without all of them an all-reduce would only wait.
    assert [one["id"] for one in bad[len(subjects) :]] == ["all_reduce"]


@pytest.mark.parametrize(
    ("pairs", "mbit", "found", "message", "remedy"),
    [
        (pairs_of("node3"), 94.1, [("failed", "node3")], "node3: 94 Mbit/s to and from every node",
         "node3's cable or port (100 Mbit/s negotiated?): Replug node3's cable"),
        (pairs_of("node1", "node3"), 94.1, [("failed", "node1"), ("failed", "node3")], "", ""),
        (OUT_OF, 310, [("failed", "node3")], "node3: 310 Mbit/s to every node, the other way is good", "half duplex"),
        (INTO, 310, [("failed", "node3")], "node3: 310 Mbit/s from every node, the other way is good", "half duplex"),
        ([("node0", "node1")], 700, [("warning", "node0 -> node1")], "", ""),
        ([("node0", "node1"), ("node1", "node0")], 300, [("failed", "node0 <-> node1")], "", "faster with others"),
        (ALL_PAIRS, 94, [("failed", "all")], "94 Mbit/s between all nodes", "A slow switch (100 Mbit/s negotiated?)"),
        ([("node1", "node2")], 0, [("failed", "node1 -> node2")], "connected, but no data arrived", "MTU"),
    ],
)  # fmt: skip
def test_who_is_to_blame_for_slow_pairs(
    cluster: Cluster, pairs: Pairs, mbit: float, found: list[tuple[str, str]], message: str, remedy: str
) -> None:
    cluster.rate(pairs, mbit)
    bad = cluster.bad()
    assert [(one["id"], one["status"], one["subject"]) for one in bad] == [
        ("bandwidth", *one) for one in found
    ]
    assert message in bad[0]["message"] and remedy in bad[0]["remedy"]


def test_the_inventory_says_how_fast_the_links_are(cluster: Cluster) -> None:
    cluster.settings = {"lan_link_speed": 2500}
    for name in NAMES:
        cluster.here(name)["speed"] = 2500
    assert cluster.only()["status"] == "failed"  # 941 of 2500
    cluster.rate(ALL_PAIRS, 2350)
    assert cluster.bad() == []


def test_a_pair_of_a_node_whose_facts_failed_is_left_out(cluster: Cluster) -> None:
    """It listened, and the others have measured it all the same."""
    cluster.nodes["node1"]["connectivity_facts"] = {"rc": 1, "stderr_lines": ["df: no such file"]}
    del cluster.nodes["node1"]["connectivity_node"]
    cluster.rate(pairs_of("node1"), 0)
    found = cluster.only()
    assert (found["id"], found["subject"]) == ("trainer", "node1")


def test_who_is_not_reached_is_not_called_slow_too(cluster: Cluster) -> None:
    cluster.close(pairs_of("node2"))
    cluster.unmeasure("node2")
    assert [one["id"] for one in cluster.bad()] == ["tcp_rendezvous", "tcp_ephemeral", "all_reduce"]


def test_with_two_nodes_both_are_named(cluster: Cluster) -> None:
    """Whose cable it is cannot be told from one pair."""
    for name in NAMES[2:]:
        cluster.lose(name, "")
        del cluster.nodes[name]
    for node in cluster.nodes.values():
        node["ansible_play_hosts_all"] = NAMES[:2]
    cluster.rate(pairs_of("node1"), 94)
    found = cluster.only()
    assert found["subject"] == "node0 <-> node1"
    assert "node0's or node1's cable or port (100 Mbit/s negotiated?)" in found["remedy"]


def test_linux_under_windows(cluster: Cluster) -> None:
    """Its card and its clock are those of Windows: what is not seen is said even where all is right."""
    for node in cluster.nodes.values():
        node["groups"] = {"cluster": NAMES, "wsl": ["node3"]}
    cluster.here("node3").update(time="windows", offsets=[], speed=10000)
    found = cluster.only()
    assert (found["id"], found["status"]) == ("link", "warning")
    assert "playbooks/windows.yml --limit node3" in found["remedy"]
    cluster.here("node3").update(ahead=3600.0, addresses=["172.20.1.1"])  # Windows slept
    remedies = {one["id"]: one["remedy"] for one in cluster.bad()}
    assert "w32tm /resync" in remedies["clock"] and "chronyc" not in remedies["clock"]
    assert "playbooks/windows.yml" in remedies["address"]


def test_builds_of_torch_may_differ_but_nccl_is_said(cluster: Cluster) -> None:
    for name in NAMES[2:]:
        cluster.here(name)["versions"]["NCCL"] = "2.29.7"
    assert cluster.bad() == []
    cluster.here("node2")["versions"]["NCCL"] = "2.27.3"
    found = cluster.only()
    assert (found["id"], found["status"]) == ("versions", "warning")
    assert "node2 has NCCL 2.27.3, the others 2.29.7" in found["message"]


@pytest.mark.parametrize("number", range(1, 9))
def test_rounds_pair_everybody_once(number: int) -> None:
    names = [f"node{i}" for i in range(number)]
    found = rounds(names)
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len({*busy}), "a node in two pairs of a round shares its link between them"
    assert sorted(tuple(sorted(pair)) for pairs in found for pair in pairs) == [*combinations(names, 2)]
    assert len(found) == (number if number % 2 else number - 1)


def test_the_playbook_reports_and_fails(cluster: Cluster, tmp_path: Path) -> None:
    """Its own last tasks, on five nodes one of which has a bad cable."""
    cluster.rate(pairs_of("node3"), 94.1)
    (play,) = plays_of("connectivity")
    names = [task["name"] for task in play["tasks"]]
    play["tasks"] = play["tasks"][names.index("Collect what is wrong with each node") :]
    for folder in ("vars", "templates"):
        (tmp_path / folder).symlink_to(tree.ROOT / "playbooks" / folder)
    known = ("inventory_hostname", "groups", "ansible_play_hosts_all")
    hosts = {
        name: {key: value for key, value in node.items() if key not in known}
        for name, node in cluster.nodes.items()
    }
    done = played(
        tmp_path, [play], {"cluster": {"hosts": hosts, "vars": {"ansible_connection": "local"}}},
        "-e", f"connectivity_json={tmp_path}/result.json",
    )  # fmt: skip
    assert done.returncode != 0, done.stdout
    lines = done.stdout.splitlines()
    assert any(line.split()[:3] == ["✓", "answers", "over"] for line in lines), done.stdout
    assert any("✗ bandwidth          node3: 94 Mbit/s to and from every node" in line for line in lines)
    assert any("→ node3's cable or port" in line for line in lines)
    assert any(line.split() == ["node3", "94✗", "94✗", "94✗", "-", "94✗"] for line in lines), "the matrix"
    assert "5 nodes: 1 failed, 0 warnings, 14 ok. What to do (→) is in the report above." in done.stdout
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["schema"], written["status"]) == (1, "failed")
    assert written["bandwidth_mbit"]["node0"] == dict.fromkeys(NAMES[1:], 941.0) | {"node3": 94.1}
    assert written["clock_offset_seconds"] == dict.fromkeys(NAMES, 4e-4)


def shells(tasks: list[dict[str, Any]]) -> list[str]:
    inner = [one for task in tasks for part in ("block", "always") for one in task.get(part, [])]
    return [one["ansible.builtin.shell"] for one in [*tasks, *inner] if "ansible.builtin.shell" in one]


def test_a_node_whose_language_writes_commas_prints_points() -> None:
    scripts = shells(loaded("playbooks/tasks/read_network.yml")) + shells(PLAY["tasks"])
    assert len(scripts) == 3
    assert {script.splitlines()[1].partition(" #")[0] for script in scripts} == {"export LC_ALL=C"}
    listed = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=True).stdout.split()
    if commas := [name for name in listed if re.match(r"(de|es|fr)_.*utf-?8", name, re.IGNORECASE)]:
        lines = scripts[0].splitlines()
        clock = next(number for number, line in enumerate(lines) if "ahead:" in line) + 1
        script = re.sub(r"\{\{.*?\}\}", "1.25", "\n".join(lines[:clock]))
        environment = os.environ | {"LC_ALL": commas[0]}
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
        assert re.search(r"ahead: [\d.e+]+\n$", done.stdout), done


def test_a_slow_pair_is_measured_twice_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "iperf3").write_text(f"#!/bin/sh\necho >> {tmp_path}/calls\necho '{iperf3(94)}'\n")
    (tmp_path / "iperf3").chmod(0o755)
    known = {
        "peer_address": "127.0.0.1", "connectivity_port": 5201, "connectivity_link_mbit": 1000.0,
        "connectivity_round": [["node0", "node1"]], "connectivity_reached": ["node1"],
    }  # fmt: skip
    task = {
        "name": "Measure",
        "ansible.builtin.include_tasks": f"{tree.ROOT}/playbooks/tasks/measure_bandwidth.yml",
    }
    show = {"name": "Show", "ansible.builtin.debug": {"msg": "{{ connectivity_rates | length }} are kept"}}
    play = {"hosts": "node0", "gather_facts": False, "tasks": [task, show]}
    hosts = {"node0": {"ansible_connection": "local"}, "node1": {}}
    done = played(
        tmp_path,
        [play],
        {"cluster": {"hosts": hosts, "vars": known}},
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.returncode == 0 and "2 are kept" in done.stdout and "[ERROR]" not in done.stdout, done.stdout
    assert len((tmp_path / "calls").read_text().splitlines()) == 4, "both directions, twice"


def test_every_check_is_explained_in_the_documentation() -> None:
    text = (tree.ROOT / "docs/troubleshooting.md").read_text()
    for check, (title, _) in EXPRESSIONS["connectivity_checks"].items():
        assert f"### {title}" in text and f"`{check}`" in text, f"{check} is not explained"
