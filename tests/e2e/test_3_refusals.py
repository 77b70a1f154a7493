"""What a person can give wrong: a clear sentence, and nothing has been changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lab_cluster import NODES, ROOT, Cluster

NANO = ("-e", "preset=gpt2-nano")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        # Of all that `aura config` refuses (tests/training/test_config.py) one.
        ((*NANO, "-e", "batchsize=4"), "batch_size"),
        ((*NANO, "-e", "corpus=nowhere"), "playbooks/prepare.yml -e corpus=nowhere"),
        ((*NANO, "-e", "corpus=s3://data/es"), "has no key for object storage: put s3_access_key"),
        ((*NANO, "-e", "corpus=s3://data"), "has to be like s3://bucket/corpora/es"),
    ],
)
def test_launch_refuses(cluster: Cluster, options: tuple[str, ...], sentence: str) -> None:
    assert sentence in cluster.refused("launch.yml", *options)


def test_launch_refuses_a_corpus_with_a_larger_vocabulary(cluster: Cluster) -> None:
    output = cluster.refused("launch.yml", *NANO, "-e", "vocab_size=512", "-e", "run=small")
    assert "2048" in output
    assert "512" in output
    assert {rank["unit"]["ActiveState"] for rank in cluster.ranks()} <= {"inactive", "failed"}


def test_prepare_takes_a_dataset_or_a_text(cluster: Cluster, tmp_path: Path) -> None:
    """A directory of node0 that is a dataset goes the way of a name on the hub, which the lab cannot reach."""
    lines = "".join(f'{{"frase": "El nodo {i} escribe la fila {i * i} en el disco."}}\\n' for i in range(400))
    cluster.sh("node0", f"mkdir -p /srv/frases && printf '%b' '{lines}' > /srv/frases/train.jsonl")
    words = ("-e", "dataset=/srv/frases", "-e", "corpus=frases", *NANO, "-e", "vocab_size=400")
    assert "Both a text and a dataset" in cluster.refused(
        "playbooks/prepare.yml", *words, "-e", f"text={tmp_path}"
    )
    assert "is no corpus of the nodes" in cluster.refused(
        "playbooks/prepare.yml", *NANO, "-e", f"text={tmp_path}", "-e", "corpus=s3://data/es"
    )
    assert "Unknown setting 'dataset_colum'" in cluster.refused(
        "playbooks/prepare.yml", *words, "-e", "dataset_colum=frase"
    )
    cluster.ansible(
        "playbooks/prepare.yml", *words, "-e", "dataset_column=frase", "-e", "dataset_max_tokens=5000"
    )
    verify = "/opt/aura/current/venv/bin/aura fingerprint /var/lib/aura/corpora/frases"
    assert len({cluster.sh(node, verify) for node in NODES}) == 1
    meta = json.loads(cluster.sh("node4", "cat /var/lib/aura/corpora/frases/meta.json"))
    assert 5000 <= sum(meta["tokens"].values()) < 5100


def changed_inventory(folder: Path, old: str, new: str) -> str:
    """A copy of the lab's inventory with one thing written wrong."""
    shutil.copytree(ROOT / "inventory/lab", folder / "lab")
    hosts = folder / "lab/hosts.yml"
    text = hosts.read_text()
    assert old in text
    hosts.write_text(text.replace(old, new))
    return str(folder / "lab")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("node4:", "node1:", "node1"),
        ("node4: {lan_address: 198.18.50.24", "node5: {lan_address: 198.18.50.25", "playbooks/bootstrap.yml"),
    ],
    ids=["duplicate hostname", "not bootstrapped"],
)
def test_site_refuses_an_inventory(
    cluster: Cluster, tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    assert sentence in cluster.refused("site.yml", inventory=changed_inventory(tmp_path, old, new))


def test_bootstrap_sends_no_password_to_whom_nobody_has_compared(cluster: Cluster, tmp_path: Path) -> None:
    inventory = tmp_path / "lab"
    shutil.copytree(ROOT / "inventory/lab", inventory)
    for name in ("known_hosts", "id_ed25519"):
        (inventory / "state" / name).unlink()
    output = cluster.refused("playbooks/bootstrap.yml", "-e", "host_keys=ask", inventory=str(inventory))
    assert "Where nobody is at a terminal: -e host_keys=FILE" in output
    assert "SHA256:" in output
    assert not (inventory / "state/known_hosts").exists()


def test_site_refuses_when_a_node_cannot_be_reached(cluster: Cluster) -> None:
    cluster.lab("cut", "node2")
    try:
        output = cluster.refused("site.yml")
    finally:
        cluster.lab("heal", "node2")
    assert "node2 does not answer" in output
    assert "198.18.50.22" in output


def test_site_refuses_a_machine_with_another_host_key(cluster: Cluster, tmp_path: Path) -> None:
    inventory = tmp_path / "lab"
    shutil.copytree(ROOT / "inventory/lab", inventory)
    recorded = inventory / "state/known_hosts"
    keys = {line.split()[0]: line.split()[2] for line in recorded.read_text().splitlines()}
    recorded.write_text(recorded.read_text().replace(keys["node2"], keys["node1"]))
    output = cluster.refused("site.yml", inventory=str(inventory))
    assert "198.18.50.22 port 22: Host key verification failed" in output
    assert "does not have the host key of node2" in output


def test_prepare_refuses_a_text(cluster: Cluster, tmp_path: Path) -> None:
    """Of all that `aura prepare` refuses (tests/training/test_prepare.py) one."""
    (tmp_path / "text.txt").write_bytes("Espa\xf1a\n".encode("latin-1") * 50)
    output = cluster.ansible(
        "playbooks/prepare.yml", *NANO, "-e", f"text={tmp_path}/text.txt", "-e", "corpus=bad", expect=None
    )
    assert "UTF-8" in output
    assert "text.txt" in output
    assert "bad" not in cluster.sh("node0", "ls /var/lib/aura/corpora")


def test_no_refusal_has_left_a_rank_behind(cluster: Cluster) -> None:
    for node in NODES:
        assert "active" not in cluster.sh(node, "systemctl is-active 'aura-train@*' || true").split()


def test_where_one_rank_cannot_start_none_goes_on(cluster: Cluster) -> None:
    cluster.sh("node2", "systemctl mask --runtime aura-train@0.service")
    try:
        output = cluster.ansible(
            "launch.yml", *NANO, "-e", "run=unborn", "-e", "trainer_first_step_timeout=20", expect=None
        )
    finally:
        cluster.sh("node2", "systemctl unmask --runtime aura-train@0.service")
    assert "node2: Failed to enable unit" in output
    assert "node0: " in output  # the others say where they were
    for node in NODES:
        assert "inactive" in cluster.sh(node, "systemctl is-active aura-train@0.service || true")
        assert "disabled" in cluster.sh(node, "systemctl is-enabled aura-train@0.service || true")
