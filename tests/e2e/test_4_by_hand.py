"""The guides' way: torchrun typed by hand on two nodes, with the guides' variables and flags."""

from __future__ import annotations

import json
import subprocess

from lab_cluster import LAB, Cluster

COMMAND = """
cd /var/lib/aura
export MASTER_ADDR=198.18.50.20 MASTER_PORT=12355 WORLD_SIZE=2 NODE_RANK={rank} OMP_NUM_THREADS=1
export GLOO_SOCKET_IFNAME=$(ip -o -4 addr show to 198.18.50.0/24 | awk '{{print $2; exit}}')
exec runuser -u aura -- timeout 180 /opt/aura/current/venv/bin/torchrun --nnodes=2 --nproc_per_node=1 \
  --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT -m aura train \
  --backend gloo --use-custom-model --custom-preset gpt2-nano --corpus /var/lib/aura/corpora/spanish \
  --batch-size 2 --steps 5 --lr 2e-4 --weight-decay 0.01 --run-dir /var/lib/aura/runs/by-hand
"""


def test_torchrun_by_hand_on_two_nodes(cluster: Cluster) -> None:
    started = [
        subprocess.Popen(
            [LAB, "exec", f"node{rank}", "sh", "-c", COMMAND.format(rank=rank)],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert f"[Rank {rank}/2 | Node node{rank} | Device cpu]" in output
        assert "Sync=OK" in output
    checksums = {
        json.loads(cluster.sh(f"node{rank}", "cat /var/lib/aura/runs/by-hand/done.json"))[
            "parameters_checksum"
        ]
        for rank in (0, 1)
    }
    assert len(checksums) == 1
