#!/usr/bin/env bash
# The guide's name (docs/guide-commands.md). On each PC, with its own NODE_RANK: starts this PC's ranks, which meet those of
# the others at MASTER_ADDR. What is typed behind it goes to train_gpt2_spanish.py.
set -euo pipefail

wrong() {
    echo "$1" >&2
    echo "On each PC: MASTER_ADDR=192.168.1.50 MASTER_PORT=12355 NNODES=5 NODE_RANK=0 GPUS_PER_NODE=1" \
        "docker compose run --rm trainer bash -lc ./ddp_launch.sh (NODE_RANK=1 on the second PC, and so on)." >&2
    exit 64
}
[[ ${MASTER_ADDR:-} ]] || wrong "MASTER_ADDR is missing."
for name in MASTER_PORT NNODES NODE_RANK GPUS_PER_NODE; do
    [[ ${!name:-} ]] || wrong "$name is missing."
    [[ ${!name} =~ ^[0-9]+$ ]] || wrong "$name is ${!name}, which is no number."
done
((NODE_RANK < NNODES)) || wrong "NODE_RANK is $NODE_RANK: of $NNODES PCs the last one has $((NNODES - 1))."

# Ctrl+C and `docker stop` have the ranks save; torchrun would give them 30 seconds.
exec torchrun --nnodes="$NNODES" --nproc_per_node="$GPUS_PER_NODE" --node_rank="$NODE_RANK" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --shutdown-timeout=600 \
    "$(dirname "$0")/train_gpt2_spanish.py" "$@"
