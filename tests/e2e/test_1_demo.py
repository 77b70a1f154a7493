"""`make demo`, exactly as the README says it, and what can be seen of its cluster from outside."""

from __future__ import annotations

import json
import re

import pytest
from lab_cluster import Cluster


def test_site_changes_nothing_the_second_time(cluster: Cluster) -> None:
    said = cluster.ansible("site.yml")
    assert said[said.index("PLAY RECAP") :].count("changed=0 ") == 5, said
    assert "changed: [" not in said


def test_one_role_alone_is_what_it_was_too(cluster: Cluster) -> None:
    """docs/operations.md, "One role, one step": with what each role is told, and without what others have found."""
    for role in ("firewall", "trainer"):
        alone = cluster.ansible("site.yml", "--tags", role, "--check")
        recap = alone[alone.index("PLAY RECAP") :]
        assert recap.count("changed=0") == 5, alone


def test_a_check_says_what_somebody_has_changed_by_hand(cluster: Cluster) -> None:
    def changed(*words: str) -> tuple[set[str], str]:
        said = cluster.ansible("site.yml", "--tags", "base,firewall", *words)
        return set(re.findall(r"^(node\d) +: .*changed=[1-9]", said, re.MULTILINE)), said

    cluster.sh("node2", "chmod 0777 /opt/aura")
    cluster.sh("node3", "nft add rule inet aura input tcp dport 44 accept")
    for _ in range(2):  # the first check has changed nothing
        nodes, said = changed("--check", "--diff")
        assert nodes == {"node2", "node3"}, said
        assert "0777" in said
    assert changed()[0] == {"node2", "node3"}
    assert changed("--check")[0] == set()


def test_the_launch_says_what_it_expects_and_what_became_of_it(cluster: Cluster) -> None:
    assert "memoria de un rank: " in cluster.demo
    assert re.search(r"Previsto: .* por paso, medido ", cluster.demo)


def test_ansible_warns_of_nothing(cluster: Cluster) -> None:
    assert "[WARNING]" not in cluster.demo


def test_the_guides_console_lines_are_there(cluster: Cluster) -> None:
    journal = cluster.sh("node3", "journalctl --no-pager -o cat -u 'aura-train@*'")
    assert re.search(
        r"^\[Rank 3/5 \| Node node3 \| Device cpu\] Epoch 1 \| Step \d+ \| Loss: \d+\.\d{4} \| Sync=OK",
        journal,
        re.M,
    )
    assert "Gradientes sincronizados" in journal


def test_tensorboard_shows_the_run_on_the_node_only(cluster: Cluster) -> None:
    page = "http://127.0.0.1:6006/data/plugin/scalars/tags"
    ask = f"import urllib.request as ask; print(ask.urlopen('{page}', timeout=20).read().decode())"
    tags = json.loads(cluster.sh("node0", f'python3 -c "{ask}"'))
    names = {name for run in tags.values() for name in run}
    wanted = {
        "Loss/train_step", "Loss/train_epoch", "Loss/val_epoch", "System/CPU_percent",
        "System/RAM_percent", "Time/epoch_seconds",
    }  # fmt: skip
    assert wanted <= names
    knock = "python3 -c 'import socket; socket.create_connection((\"198.18.50.20\", {}), 4)' 2>&1 || true"
    assert "timed out" in cluster.sh("node1", knock.format(6006))
    # The same peer reaches the port that ranks use: there is nobody, but nobody drops the packet either.
    assert "refused" in cluster.sh("node1", knock.format(12355))


def test_connectivity_is_green_and_machine_readable(cluster: Cluster, tmp_path) -> None:
    found = tmp_path / "connectivity.json"
    cluster.ansible("playbooks/connectivity.yml", "-e", f"connectivity_json={found}")
    result = json.loads(found.read_text())
    assert {check["status"] for check in result["checks"]} <= {"ok", "warning"}
    assert "not checked" not in {check["message"] for check in result["checks"]}
    rates = [rate for of in result["bandwidth_mbit"].values() for rate in of.values()]
    assert len(rates) == 20 and all(isinstance(rate, float) for rate in rates), rates


@pytest.mark.more
def test_connectivity_names_the_node_whose_cable_is_out_and_the_slow_one(cluster: Cluster, tmp_path) -> None:
    found = tmp_path / "connectivity.json"
    cluster.lab("cut", "node3")
    cluster.lab("rate", "node1", "90mbit")
    try:
        output = cluster.ansible(
            "playbooks/connectivity.yml", "-e", f"connectivity_json={found}", expect=None
        )
    finally:
        cluster.lab("heal", "node3")
        cluster.lab("rate", "node1", "1000mbit")
    failed = [check for check in json.loads(found.read_text())["checks"] if check["status"] == "failed"]
    assert any("node3" in check["subject"] for check in failed)
    assert any("node1" in check["subject"] for check in failed)
    assert all(check["remedy"] for check in failed)
    assert "node3" in output
