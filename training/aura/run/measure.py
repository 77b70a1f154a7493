"""What `strategy=auto` measures at the start of a run: the link, a micro-batch, the wire's codec. About a second each.

All ranks measure at the same time, as they will work at the same time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.corpus.sequences import Sequences
from aura.model.language_model import LanguageModel
from aura.plan.gpus import Gpu
from aura.plan.memory import CODE_BITS
from aura.plan.rank import ranks_of
from aura.plan.setting import Cluster, exchanging
from aura.plan.step_time import Coding, Work
from aura.run.batches import Batches
from aura.run.division import Division
from aura.run.memory_dry_run import forward_and_backward
from aura.strategy.codec import decode, encode
from aura.strategy.sharded import owned_in_buckets

FIRST, MOST = 2**18, 2**25  # bytes that a rank sends in one exchange
ENOUGH = 0.25  # seconds: an exchange that takes so long says how fast the link is
FACTOR = 8  # at the most, from one exchange to the next
LONGEST, TIMES = 1.0, 9  # seconds, and micro-batches


def cluster(
    config: TrainConfig,
    ranks: Ranks,
    device: torch.device,
    devices: Sequence[Gpu],
    model: LanguageModel,
    sequences: Sequences,
) -> Cluster:
    """devices: of every rank. Every rank has to ask at the same time. Raises CollectiveFailed."""
    nodes = len(set(ranks.nodes))
    batches = Batches(sequences, config, Division(config, ranks.nodes), ranks.rank, device)
    batches.begin_step(1)
    own = micro_batch_seconds(config, ranks, model, batches)
    coding = codings(device, pieces(config, ranks, model))
    # Where the share is no multiple of the micro-batch, the last one is shorter.
    count = math.ceil(batches.share / batches.size)
    seconds = own * batches.share / batches.size / count
    row = [count, nanoseconds(seconds), batches.share]
    # Attoseconds: an element takes some nanoseconds.
    row += [round(part * 1e18) for wire in CODE_BITS for part in (coding[wire].encode, coding[wire].decode)]
    rows = ranks.gather(row)
    slowest = [max(column) / 1e18 for column in list(zip(*rows, strict=True))[3:]]
    return Cluster(
        nodes=nodes,
        works=tuple(
            Work(count, time / 1e9, share * config.seq_len / count) for count, time, share, *_ in rows
        ),
        speed=link_speed(ranks),
        codings={wire: Coding(*slowest[2 * place : 2 * place + 2]) for place, wire in enumerate(CODE_BITS)},
        rooms=tuple(rank.room for rank in ranks_of(config, devices, nodes, None)),
        on_gpu=any(device.is_gpu for device in devices),
    )


def link_speed(ranks: Ranks) -> float:
    """Bytes per second that the link of every node sends to the others while it receives as many; the slowest pair
    decides. Every rank has to ask at the same time."""
    size = FIRST
    on_nodes = [ranks.nodes.count(node) for node in set(ranks.nodes)]
    parts = max(count * (ranks.world_size - count) for count in on_nodes)  # over one link
    while True:
        part = size // ranks.world_size
        rows = ranks.gather([nanoseconds(_exchange_seconds(ranks, part))])
        seconds = max(row[0] for row in rows) / 1e9  # of the slowest
        if seconds >= ENOUGH or size == MOST:
            return part * parts / seconds
        # The first exchange opens connections: it says too little about the link.
        size = min(MOST, int(size * min(FACTOR, max(2.0, 1.2 * ENOUGH / seconds))))


def _exchange_seconds(ranks: Ranks, part: int) -> float:
    sent = torch.zeros(part * ranks.world_size, dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)
    ranks.total([0.0])  # all begin together
    began = time.perf_counter()
    with ranks.together():
        dist.all_to_all_single(received, sent)
        _wait_for(ranks.device)
    return time.perf_counter() - began


def nanoseconds(seconds: float) -> int:
    """As ranks exchange them; at least one."""
    return max(1, round(seconds * 1e9))


def micro_batch_seconds(config: TrainConfig, ranks: Ranks, model: LanguageModel, batches: Batches) -> float:
    """The median of a forward and backward pass over this rank's first sequences, after one that warms up."""
    batch = next(iter(batches.of_step(0)))
    compute = partial(forward_and_backward, config, model, batch.inputs, batch.targets)
    compute()
    ranks.total([0.0])  # those that compile have done so
    found = _seconds(compute, batches.device, LONGEST)
    for parameter in model.parameters():
        parameter.grad = None
    return found


def pieces(config: TrainConfig, ranks: Ranks, model: LanguageModel) -> dict[str, int]:
    """By wire, how many elements this rank mostly encodes at once. A round bounds them: 4 MiB in the wire's format are
    8 million in int4. Every rank has to ask at the same time."""
    found = {}
    for wire in CODE_BITS:
        _, rounds = owned_in_buckets(model, ranks, exchanging(config, wire, 0.0))
        # Ranks that share a link encode a part each (strategy/by_node.py).
        found[wire] = math.ceil(max(rounds[0].lengths) / ranks.nodes.count(ranks.nodes[ranks.rank]))
    return found


def codings(device: torch.device, elements: Mapping[str, int]) -> dict[str, Coding]:
    """By wire, for each element, where so many are encoded and decoded at once: with few of them, a card's time is that
    of its launches."""
    found, longest = {}, LONGEST / len(elements) / 2
    for wire, count in elements.items():
        values = torch.randn(count, device=device, generator=torch.Generator(device).manual_seed(0))
        there = _seconds(partial(encode, values, wire), device, longest)
        back = _seconds(partial(decode, encode(values, wire), wire, count), device, longest)
        found[wire] = Coding(there / count, back / count)
    return found


def _seconds(act: Callable[[], object], device: torch.device, longest: float) -> float:
    """The median, of as many as there is time for: `longest` seconds."""
    found: list[float] = []
    while len(found) < TIMES and sum(found) < longest:
        _wait_for(device)
        began = time.perf_counter()
        act()
        _wait_for(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
