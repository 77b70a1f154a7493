"""torchft's DiLoCo as one of the ways of `make bench-wire`: local steps on the same clocks, and once in LOCAL_STEPS of
them an exchange over the same links. Needs torchft (wire.py says how to get it)."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aura.cluster.rendezvous_store import own_address
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from waits import Gpu, Way
from wire_arms import LOCAL_STEPS, Task

PATIENCE = timedelta(minutes=10)


class LocalUpdate(torch.optim.Optimizer):
    """A wait; the parameters stay what they are, and so all bytes of an exchange are zeros, which go over the wire like
    any others."""

    def __init__(self, parameters: Any, gpu: Gpu, seconds: float) -> None:
        super().__init__(parameters, {})
        self.gpu, self.seconds = gpu, seconds

    def step(self, closure: Any = None) -> Any:
        self.gpu.work_now(self.seconds)


class TorchftDiLoCo(Way):
    def __init__(self, task: Task, rank: int, store: str) -> None:
        super().__init__(task, rank)
        self.steps = task.warm_up + task.steps
        self.model.fill(0)  # DiLoCo begins with the same weights everywhere
        host, port = store.split(":")
        self.manager = self._manager(rank, self.arm.nodes, own_address(host, int(port)), store)
        seconds = self.waits.whole_update * self.arm.slowness[rank]
        self.optimizer = LocalUpdate(self.model.parameters(), self.gpu, seconds)
        # The paper's outer optimizer (section 2)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(
            self.manager, [self.model], self.optimizer, outer, sync_every=LOCAL_STEPS, pin_memory=False
        )
        self.diloco.__enter__()
        self.gpu.nothing_before(time.perf_counter())

    def _manager(self, rank: int, ranks: int, address: str, store: str) -> Manager:
        """Each rank is a replica of its own, with a store of its own; rank 0 has the lighthouse at which they meet."""
        port = [""]
        if rank == 0:
            self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=ranks, join_timeout_ms=60_000)
            port = [self.lighthouse.address().rpartition(":")[2]]
        dist.broadcast_object_list(port)
        self.store = dist.TCPStore(address, 0, 1, is_master=True, wait_for_workers=False)
        return Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=ranks,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self.store.port,
            lighthouse_addr=f"http://{store.split(':')[0]}:{port[0]}",
            replica_id=f"rank{rank}",
            hostname=address,
            init_sync=False,
        )

    def step(self) -> None:
        for seconds in self.micro_batches:
            self.gpu.work(seconds)
        self.optimizer.step()
        self.gpu.nothing_before(time.perf_counter())

    def end(self) -> bool:
        assert self.manager.current_step() == self.steps // LOCAL_STEPS, "an exchange was not committed"
        self.diloco.__exit__(None, None, None)
        return True
