"""drift.yml is silent after site.yml, and finds what hands have changed: at least one thing of every role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_cluster import NODES, Cluster

# role, node, what somebody types there as root, and what the report says (or shows as the difference).
CHANGES = [
    ("base", "node1", "rm /etc/systemd/system/aura-awake.service", "aura-awake.service"),
    ("base", "node2", "chmod 0777 /opt/aura", "0777"),
    ("base", "node3", "usermod --shell /bin/bash aura", "cannot log in"),
    ("base", "node4", "rm /etc/systemd/journald.conf.d/90-aura.conf", "journal"),
    ("safe_change", "node1", "echo '# mine' >>/usr/local/lib/aura/safe-change", "changes and undoes"),
    ("static_network", "node2", "echo '# mine' >>/etc/netplan/90-aura.yaml", "90-aura.yaml"),
    ("firewall", "node3", "nft add rule inet aura input tcp dport 44 accept", "somebody has changed"),
    ("firewall", "node4", "systemctl disable aura-firewall.service", "aura-firewall"),
    ("node_name", "node1", "sed -i /node3$/d /etc/hosts", "+198.18.50.23 node3"),
    ("sshd", "node2", "echo PermitRootLogin yes >/etc/ssh/sshd_config.d/01-mine.conf", "sshd"),
    ("time_sync", "node3", "systemctl stop chrony", "Chrony runs"),
    ("time_sync", "node4", "echo pool example.invalid >>/etc/chrony/chrony.conf", "-pool example.invalid"),
    ("python_env", "node1", "rm /opt/aura/wheelhouse.complete", "wheelhouse"),
    ("trainer", "node2", "sed -i s/=mixed/=process/ /etc/systemd/system/aura-train@.service", "+KillMode=mixed"),
    ("tensorboard", "node0", "systemctl disable --now aura-tensorboard.service", "after a reboot: TensorBoard"),
]  # fmt: skip


@pytest.mark.more
def test_every_kind_of_change_by_hand_is_found(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "drift.json"
    option = ("-e", f"drift_json={file}")

    def found() -> dict[str, dict[str, object]]:
        return {name: node for name, node in json.loads(file.read_text())["nodes"].items()}

    assert "node4  as it should be" in cluster.ansible("playbooks/drift.yml", *option)
    assert {name: node["state"] for name, node in found().items()} == dict.fromkeys(NODES, "same")

    for _, node, command, _ in CHANGES:
        cluster.sh(node, command)
    try:
        said = cluster.ansible("playbooks/drift.yml", *option, expect=2)
        nodes = found()
    finally:
        # A setting that comes before ours is nothing that site.yml may take away.
        cluster.sh("node2", "rm /etc/ssh/sshd_config.d/01-mine.conf")
        cluster.ansible("site.yml")
    for role, node, command, shown in CHANGES:
        about = [entry for entry in nodes[node]["differences"] if entry["role"] == role]
        assert shown in json.dumps(about, ensure_ascii=False), (
            f"{command!r} on {node} was not found: {about}\n{said}"
        )
    assert {node["state"] for node in nodes.values()} == {"differs"}
    assert "differs in" in said
    cluster.ansible("playbooks/drift.yml", *option)


@pytest.mark.more
def test_a_node_that_is_off_hides_no_other(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "drift.json"
    cluster.lab("power-off", "node4")
    cluster.sh("node3", "systemctl stop chrony")
    try:
        said = cluster.ansible("playbooks/drift.yml", "-e", f"drift_json={file}", expect=4)
    finally:
        cluster.lab("power-on", "node4")
        cluster.sh("node3", "systemctl start chrony")
    states = {name: node["state"] for name, node in json.loads(file.read_text())["nodes"].items()}
    assert states == {
        "node0": "same",
        "node1": "same",
        "node2": "same",
        "node3": "differs",
        "node4": "unknown",
    }
    assert "node4 does not answer" in " ".join(said.split())


@pytest.mark.parametrize("wrong", [["-i", "/nonexistent"], ["--limit", "nobody"]])
def test_what_cannot_begin_is_no_difference(cluster: Cluster, wrong: list[str]) -> None:
    with pytest.raises(AssertionError, match=r"ended with [^02]\b"):
        cluster.ansible("playbooks/drift.yml", *wrong, expect=0)
