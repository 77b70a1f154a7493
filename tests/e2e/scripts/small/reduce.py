"""Adds up the ranks a few times, and does what its first argument says: end, fail (rank 2), wait (for SIGTERM)."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # DeepSpeed's
what, seconds = words[0], float(words[1]) if len(words) > 1 else 0.0
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def save(number, frame):
    time.sleep(seconds)
    Path(f"saved-{rank}").write_text(f"step {step}")
    print("saved", flush=True)
    sys.exit(0)


step = 0
while what != "end" or step < 3:
    step += 1
    if what == "fail" and step == 3 and rank == 2:
        raise ValueError(f"the batch of step {step} is broken")
    total = torch.tensor(rank)
    dist.all_reduce(total)
    assert total == world * (world - 1) // 2
    if step == 1:
        print(f"{world} ranks over {os.environ['GLOO_SOCKET_IFNAME']} {os.environ.get('WORDS')}", flush=True)
        if what == "wait":
            signal.signal(signal.SIGTERM, save)
    if what == "wait" and step == 2:
        while True:  # no rank waits for another one while it saves
            time.sleep(1)
Path(f"ended-{rank}").write_text(str(world))
dist.destroy_process_group()
