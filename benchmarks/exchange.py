"""The strategy `sharded` beside torch's DistributedDataParallel: seconds of a step, bytes on the wire.

    python benchmarks/exchange.py --preset gpt2-nano --ranks 5 --steps 40

All ranks are processes of this machine; both ways do the same steps with the same optimizer, in turns. They talk
over loopback, or, with --lab RATE, over the links of the lab's nodes (`make lab-up` first, as root), shaped to that
rate: each rank in the network of a node, with nothing else of it. The bytes are those that the ranks' network cards
have sent, with TCP's headers and whatever else uses them: for a count of these alone over loopback, run it in a
network of its own (`unshare --net sh -c 'ip link set lo up; python benchmarks/exchange.py'`).
"""

import argparse
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
from measuring import options
from ranks import bf16_on_the_wire, join, leave, options_of_a_rank, places, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Way = tuple[Callable[[list[Tensor]], None], Callable[[], None]]  # a step, and what ends a row of steps


class LossSum(nn.Module):
    """DistributedDataParallel calls `forward`."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss_sum(tokens[:, :-1], tokens[:, 1:])


def sharded(config: TrainConfig, rank: int, ranks: int) -> Way:
    model = GPT(config)
    strategy = Sharded(model, Ranks(rank, [f"node{n}" for n in range(ranks)], torch.device("cpu")), config)
    loss_of = LossSum(model)

    def step(batches: list[Tensor]) -> None:
        strategy.begin_step()
        loss_sum = 0.0
        for number, batch in enumerate(batches, 1):
            loss = loss_of(batch)
            with strategy.last_backward() if number == len(batches) else nullcontext():
                loss.backward()
            loss_sum += loss.item()
        strategy.apply(Told(loss_sum, sum(batch[:, 1:].numel() for batch in batches)), config.lr)()

    return step, strategy.complete


def torchs_ddp(config: TrainConfig, ranks: int) -> Way:
    model = GPT(config)
    parallel = DistributedDataParallel(LossSum(model), gradient_as_bucket_view=True)
    if config.wire == "bf16":
        parallel.register_comm_hook(None, bf16_on_the_wire)
    optimizer = optimizer_of(model, config)

    def step(batches: list[Tensor]) -> None:
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


def bytes_sent(card: str, ranks: int) -> int:
    """By all ranks; over loopback all of them see the same card."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    own = next(int(line.split()[9]) for line in lines if line.split()[0] == f"{card}:")
    counted = torch.tensor([own])
    dist.all_reduce(counted)
    return int(counted.item()) // (ranks if card == "lo" else 1)


def memory(what: str) -> int:
    """Of this process [bytes]: VmRSS now, VmHWM the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def work(given: argparse.Namespace) -> None:
    rank, ranks = given.rank, given.ranks
    join(rank, ranks, given.card, given.store)
    settings = dict(one.split("=", 1) for one in given.setting)
    config = resolve(given.preset, {"optimizer": given.optimizer, "wire": given.wire, **settings})
    before_all = memory("VmRSS")
    ways = {"sharded": sharded(config, rank, ranks)}
    if not given.memory:
        ways["DDP"] = torchs_ddp(config, ranks)
    generator = torch.Generator().manual_seed(rank)
    shape = (config.gradient_accumulation_steps, config.batch_size, config.seq_len + 1)
    found: dict[str, list[tuple[float, float, float]]] = {
        way: [] for way in ways
    }  # seconds, of CPU, bytes of a step
    for turn in range(given.turns + 1):  # the first one warms up
        for way, (step, finish) in ways.items():
            dist.barrier()
            before, began, cpu = bytes_sent(given.card, ranks), time.perf_counter(), time.process_time()
            for _ in range(given.steps):
                step(list(torch.randint(config.vocab_size, shape, generator=generator)))
            finish()
            cpu = time.process_time() - cpu
            dist.barrier()
            took, sent = time.perf_counter() - began, bytes_sent(given.card, ranks) - before
            if turn:
                found[way].append((took / given.steps, cpu / given.steps, sent / given.steps))
    if rank == 0:
        say(given, config, found)
    if given.memory:
        # Of what torch itself takes nothing counts; the highest of all ranks.
        peak = torch.tensor([memory("VmHWM") - before_all])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        predicted = memory_of(config, config.batch_size, on_gpu=False, ranks=ranks).tensors
        if rank == 0:
            print(
                f"memory of a rank: {peak.item() / 1e9:.3f} GB at the most, predicted {predicted / 1e9:.3f} GB"
            )
    leave()


def say(
    given: argparse.Namespace, config: TrainConfig, found: dict[str, list[tuple[float, float, float]]]
) -> None:
    link = f"links of {given.lab}" if given.lab else "loopback"
    about = f"{' '.join([given.preset, *given.setting])}, {given.optimizer}, {given.wire} on the wire"
    print(f"{about}, {given.ranks} ranks, {link}; {given.turns} turns")
    of_all_reduce = 2 * (given.ranks - 1) * GPT(config, "meta").parameter_count() * 4
    for way, turns in found.items():
        seconds, cpu, sent = zip(*turns, strict=True)
        median, wire = statistics.median(seconds), statistics.median(sent)
        print(f"{way:8} {median:.4f} s a step ({min(seconds):.4f} to {max(seconds):.4f}), ", end="")
        print(f"{statistics.median(cpu):.4f} s of CPU on rank 0; ", end="")
        print(f"{wire / 1e6:.3f} MB of all ranks, {wire / of_all_reduce:.4f} of an all-reduce in fp32")


def main() -> None:
    parser = options(__doc__, text=False)
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
    options_of_a_rank(parser)
    given = parser.parse_args()
    if given.rank is not None:
        work(given)
    with places(given.ranks, given.lab) as where:
        sys.exit(run_ranks(where, sys.argv))


if __name__ == "__main__":
    main()
