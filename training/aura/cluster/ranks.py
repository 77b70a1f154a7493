"""What one rank knows about the others: sums, comparisons, broadcasts of small things."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aura.cluster.activity import Activity
from aura.texts.console import text


class CollectiveFailed(Exception):
    """An operation that needs all ranks has failed: one of them, or the way to it, is gone."""


@contextmanager
def collective() -> Iterator[None]:
    """torch.distributed reports a vanished peer as RuntimeError or a subclass, like its own bugs."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "CUDA error" in str(error):  # of this rank's own card, which is told by it while it waits
            raise
        raise CollectiveFailed(str(error)) from error


class Ranks:
    """This rank among the others. With one rank every method answers at once, without torch.distributed."""

    def __init__(
        self, rank: int, nodes: list[str], device: torch.device, activity: Activity | None = None
    ) -> None:
        """`nodes`: the name of every rank's node. `activity` is told when this rank waits for others."""
        self.rank, self.nodes, self.world_size = rank, nodes, len(nodes)
        self.activity = activity or Activity()
        # NCCL moves only GPU memory; gloo is quicker with the CPU's.
        uses_nccl = self.world_size > 1 and dist.get_backend() == "nccl"
        self.device = device if uses_nccl else torch.device("cpu")
        # What an operation of all ranks has to wait for
        self.before_collective: Callable[[], None] = lambda: None

    def name(self, ranks: list[int]) -> str:
        """'rank 1 on node1, rank 3 on node3'"""
        return ", ".join(text("rank_on_node", rank=rank, node=self.nodes[rank]) for rank in ranks)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What follows ends when all ranks do it. Raises CollectiveFailed."""
        self.before_collective()
        with self.activity.waiting(), collective():
            yield

    def total(self, values: list[float]) -> list[float]:
        """The element-wise sum over all ranks, in fp64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.together():
            dist.all_reduce(tensor)
            return tensor.tolist()

    def gather(self, values: list[int]) -> list[list[int]]:
        """The values of every rank, by rank; 64-bit integers."""
        return self._rows(values, torch.int64)

    def rows(self, values: list[float]) -> list[list[float]]:
        """The values of every rank, by rank; in fp64."""
        return self._rows(values, torch.float64)

    def _rows(self, values: list[Any], kind: torch.dtype) -> list[list[Any]]:
        if self.world_size == 1:
            return [values]
        tensor = torch.tensor(values, dtype=kind, device=self.device)
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self.together():
            dist.all_gather(rows, tensor)
            return [row.tolist() for row in rows]

    def odd_ones(self, value: int) -> list[int]:
        """The ranks whose value differs from that of the majority (of rank 0, when there is none)."""
        values = [row[0] for row in self.gather([value])]
        usual = max(values, key=values.count)
        return [rank for rank, other in enumerate(values) if other != usual]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` with that of rank `source`."""
        if self.world_size > 1:
            with self.together():
                dist.broadcast(tensor, source)
        return tensor

    def send(self, tensor: Tensor, source: int, lacking: list[int]) -> None:
        """Overwrite `tensor` of the ranks that lack it with that of rank `source`. All ranks have to call this."""
        if self._pass_on(lacking):
            self.broadcast(tensor, source)
        elif self.rank == source:
            sent = tensor.to(self.device)  # gloo sends no memory of a GPU
            with self.together():
                for rank in lacking:
                    dist.send(sent, rank)
        elif self.rank in lacking:
            received = torch.empty_like(tensor, device=self.device)
            with self.together():
                dist.recv(received, source)
            tensor.copy_(received)

    def _pass_on(self, lacking: list[int]) -> bool:
        """Are they so many that to pass it on from rank to rank, through all of them, is quicker?"""
        return 2 * len(lacking) >= self.world_size

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        length = self.broadcast(torch.tensor([len(data)], device=self.device), source)
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return bytes(self.broadcast(buffer, source).cpu().numpy())

    def all_of(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says of itself, by rank; as JSON."""
        said = json.dumps(own).encode()
        return [json.loads(self.broadcast_bytes(said, rank)) for rank in range(self.world_size)]

    def send_tensors(self, tensors: dict[str, Tensor], source: int, lacking: list[int]) -> dict[str, Tensor]:
        """Those of rank `source` by name, in the CPU's memory, where they are lacking. All ranks have to call this."""
        described = [(name, str(t.dtype).split(".")[1], list(t.shape)) for name, t in tensors.items()]
        received = {}
        for name, kind, shape in json.loads(self.broadcast_bytes(json.dumps(described).encode(), source)):
            if self.rank == source:
                tensor = tensors[name].to(self.device)
            elif self.rank in lacking or self._pass_on(lacking):
                tensor = torch.empty(shape, dtype=getattr(torch, kind), device=self.device)
            else:
                continue
            self.send(tensor, source, lacking)
            if self.rank in lacking:
                received[name] = tensor.cpu()
        return received
