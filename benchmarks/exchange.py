"""The strategy `sharded` beside torch's DistributedDataParallel: seconds of a step, bytes on the wire.

    python benchmarks/exchange.py --preset gpt2-nano --ranks 5 --steps 40

All ranks are processes of this machine; both ways do the same steps with the same optimizer, in turns. They talk
over loopback, or, with --lab RATE, over the links of the lab's nodes (`make lab-up` first, as root), shaped to that
rate: each rank in the network of a node, with nothing else of it. The bytes are those that the ranks' network cards
have sent, with TCP's headers and whatever else uses them: for a count of these alone over loopback, run it in a
network of its own (`unshare --net sh -c 'ip link set lo up; python benchmarks/exchange.py'`).
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig, resolve
from aura.model.gpt import GPT
from aura.optim.muon import optimizer_of
from aura.plan.memory import memory_of
from aura.strategy.interface import Told, clip_factor
from aura.strategy.sharded import Sharded
from lab_ranks import LOOPBACK, bf16_on_the_wire, in_the_lab, join, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[list[torch.Tensor]], None]
Way = tuple[Step, Callable[[], None]]  # and what ends a row of steps


class LossSum(nn.Module):
    """DistributedDataParallel calls `forward`."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.loss_sum(tokens[:, :-1], tokens[:, 1:])


def sharded(config: TrainConfig, rank: int, ranks: int) -> Way:
    model = GPT(config)
    nodes = [f"node{number}" for number in range(ranks)]
    strategy = Sharded(model, Ranks(rank, nodes, torch.device("cpu")), config)
    loss_of = LossSum(model)

    def step(batches: list[torch.Tensor]) -> None:
        strategy.begin_step()
        loss_sum = 0.0
        for number, batch in enumerate(batches, 1):
            loss = loss_of(batch)
            with strategy.last_backward() if number == len(batches) else nullcontext():
                loss.backward()
            loss_sum += loss.item()
        strategy.apply(Told(loss_sum, sum(batch[:, 1:].numel() for batch in batches)), config.lr)()

    return step, strategy.complete


def torchs_ddp(config: TrainConfig, ranks: int, wire: torch.dtype) -> Way:
    model = GPT(config)
    parallel = DistributedDataParallel(LossSum(model), gradient_as_bucket_view=True)
    if wire == torch.bfloat16:
        parallel.register_comm_hook(None, bf16_on_the_wire)
    optimizer = optimizer_of(model, config)

    def step(batches: list[torch.Tensor]) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        numbers = torch.zeros(2, dtype=torch.float64)
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else parallel.no_sync():
                loss = parallel(batch)
                loss.backward()
            numbers += torch.tensor([loss.item(), batch[:, 1:].numel()])
        dist.all_reduce(numbers)
        tokens = int(numbers[1].item())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # DistributedDataParallel has divided by the number of ranks.
        norm = float(torch.nn.utils.get_total_norm(gradients)) * ranks / tokens
        for gradient in gradients:
            gradient.mul_(clip_factor(norm, config.clip, tokens) * ranks)
        optimizer.step(config.lr)

    return step, lambda: None


def bytes_sent(card: str) -> int:
    (line,) = (
        text for text in Path("/proc/net/dev").read_text().splitlines() if text.strip().startswith(f"{card}:")
    )
    return int(line.split(":")[1].split()[8])


def bytes_of_all(card: str, ranks: int) -> int:
    """Over loopback all ranks see the same card."""
    counted = torch.tensor([bytes_sent(card)])
    dist.all_reduce(counted)
    return int(counted.item()) // (ranks if card == "lo" else 1)


def work(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank = given.rank
    join(rank, given.ranks, given.card, given.store)
    settings = dict(one.split("=", 1) for one in given.setting)
    sizes = {name: int(value) if value.isdecimal() else value for name, value in settings.items()}
    config = resolve(given.preset, {"optimizer": given.optimizer, "wire": given.wire, **sizes})
    before_all = memory("VmRSS")
    ways = {"sharded": sharded(config, rank, given.ranks)}
    if not given.memory:
        wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.wire]
        ways["DDP"] = torchs_ddp(config, given.ranks, wire)
    elements = sum(parameter.numel() for parameter in GPT(config, "meta").parameters())
    generator = torch.Generator().manual_seed(rank)
    shape = (config.gradient_accumulation_steps, config.batch_size, config.seq_len + 1)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    busy: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, list[int]] = {way: [] for way in ways}
    for turn in range(given.turns + 1):  # the first one warms up
        for way, (step, finish) in ways.items():
            dist.barrier()
            before = bytes_of_all(given.card, given.ranks)
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(given.steps):
                step(list(torch.randint(config.vocab_size, shape, generator=generator)))
            finish()
            cpu = time.process_time() - cpu
            dist.barrier()
            took, after = time.perf_counter() - began, bytes_of_all(given.card, given.ranks)
            if turn:
                seconds[way].append(took / given.steps)
                busy[way].append(cpu / given.steps)
                sent[way].append((after - before) // given.steps)
    if rank == 0:
        of_all_reduce = 2 * (given.ranks - 1) * elements * 4
        link = f"links of {given.lab}" if given.lab else "loopback"
        print(" ".join([given.preset, *given.setting]), end=", ")
        print(f"{given.optimizer}, {given.wire} on the wire, {given.ranks} ranks, {link}")
        for way in ways:
            median, low, high = statistics.median(seconds[way]), min(seconds[way]), max(seconds[way])
            on_wire = statistics.median(sent[way])
            print(f"{way:8} {median:.4f} s a step ({given.turns} turns: {low:.4f} to {high:.4f}), ", end="")
            print(f"{statistics.median(busy[way]):.4f} s of CPU on rank 0; ", end="")
            print(
                f"{on_wire / 1e6:.3f} MB of all ranks, {on_wire / of_all_reduce:.4f} of an all-reduce in fp32"
            )
    if given.memory:
        # Of what torch itself takes nothing counts; the highest of all ranks.
        peak = torch.tensor([memory("VmHWM") - before_all])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        predicted = memory_of(config, config.batch_size, on_gpu=False, ranks=given.ranks).tensors
        if rank == 0:
            print(
                f"memory of a rank: {peak.item() / 1e9:.3f} GB at the most, predicted {predicted / 1e9:.3f} GB"
            )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without waiting for the threads of gloo


def memory(what: str) -> int:
    """Of this process [bytes]: VmRSS now, VmHWM the most there was."""
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(what))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2-nano")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="in place of the preset's"
    )
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--wire", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--memory", action="store_true", help="of a rank, beside the plan's; without DDP")
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of one turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lab", metavar="RATE", default="", help="over the lab's links, 100mbit say")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # one process of those that main starts
    parser.add_argument("--card", default="lo", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        work(given)
        return
    with in_the_lab(given.ranks, given.lab) if given.lab else nullcontext([LOOPBACK] * given.ranks) as places:
        sys.exit(run_ranks(places, sys.argv))


if __name__ == "__main__":
    main()
