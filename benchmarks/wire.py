"""`make bench-wire`: how much faster five PCs on a slow link train gpt2-medium than one, on this machine.

Each rank is a process in the network of a lab node, whose link is shaped. To fit five of them into one machine, every
matrix has a 16th of its elements and the link a 16th of its rate (--scale), so that times are those of the full size.

Real: the trainer's strategies (strategy/sharded.py, delayed.py) with their threads, rounds and codec, in a loop as that
of run/trainer.py, as many rounds as at full size; gloo, TCP, the links. At the end all ranks compare their parameters.
Emulated: the GPU is a clock (waits.py). Forward and backward passes, Newton-Schulz and what a step moves through the
GPU's memory (the codec, sums of gradients) are waits, as long as the plan says for this card; gradients were made
beforehand and leave layer by layer. The processor does encode and decode, beside the GPU's clock: where it is late, the
GPU goes on with what is queued. Its load is printed: above 20 % a figure says something about this machine.
Not in it: copies between GPU and processor, validation and checkpoints, unlike clocks, anything that breaks.

With --encoded-beforehand each of our arms runs a second time with bytes that were encoded once and are not decoded:
only the wire is real. So does the full size (--scale 1), which else needs more processor and memory than there is.

Speed-up: one node without any framework (its waits for the same tokens and a whole update, nothing else) by the mean
step of all. Tokens per second are those of steps that have ended. A figure of torch's DDP or torchft's DiLoCo (the same
waits, the same links) is not comparable where the processor is its limit. The last line is JSON, of one setting on both
cards: int4 with the delay that is best on the RTX 4090.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import wire_arms as of
from aura.plan.rank import GIGABIT
from measuring import HERE, options, show, write_results
from ranks import DistEnv, places, run_ranks
from wire_arms import CARDS, DILOCO, GROUPS, LOCAL_STEPS, Arm, Lengths, Task, diloco, lengths

MOST_LOAD = 0.2  # of the machine
LEAST_GOODPUT = 0.9  # of what a link carries
STEPS, STEPS_OF_LONG_ONES, LONG = 8, 5, 10.0  # steps that are measured; seconds of one
# Of one Gbit/s, what is data [Mbit/s]
DATA = GIGABIT * 8 / 1e6
# What has been used once is kept for the next time, as on a GPU: else the kernel clears every page again.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "RUST_LOG": "warn",  # torchft's
}


@dataclass(frozen=True)
class Row:
    arm: Arm
    seconds: Sequence[float]  # of every step that was measured
    waits: Lengths
    sent: float  # by a rank in a step, bytes at full size
    goodput: float | None  # Mbit/s at full size
    load: float  # of all cores of this machine
    equal: bool  # the parameters of all ranks

    @property
    def step(self) -> float:
        """The mean: where one step ends late, the next one is short."""
        return statistics.mean(self.seconds)

    @property
    def speedup(self) -> float:
        return self.waits.alone / self.step

    def part_of_link(self) -> float | None:
        """Goodput, of what the link carries of data."""
        return self.goodput and self.goodput / (DATA * self.arm.link / 1000)

    def notes(self, shaped: bool) -> str:
        said = []
        if shaped and (part := self.part_of_link()) and part < LEAST_GOODPUT:
            said.append("the link was not full")
        if self.load > MOST_LOAD:
            said.append(
                "not comparable: the processor" if self.arm.rival else "the processor may be its limit"
            )
        return ", ".join(said if self.equal else [*said, "PARAMETERS DIFFER"])

    def cells(self, shaped: bool) -> list[str]:
        arm, low, high = self.arm, min(self.seconds), max(self.seconds)
        data = "" if self.goodput is None else f"{self.goodput:.0f}"
        if shaped and (part := self.part_of_link()):
            data += f" ({part:.0%})"
        return [
            arm.card.removeprefix("RTX "),
            arm.whole_setting,
            f"{arm.nodes}{' (1 slow)' if arm.slow else ''}",
            f"{arm.link:g}",
            f"{self.step:.2f} ({statistics.median(self.seconds):.2f}, {low:.2f} to {high:.2f})",
            f"{self.waits.tokens / self.step:,.0f}",
            f"{self.speedup:.2f} of {self.waits.ceiling:.2f}",
            data,
            f"{self.load:.0%}",
            self.notes(shaped),
        ]


# s a step: mean (median, range). Data: gradients and weights while the wire is busy, and their part of what the link
# carries. Load: of the machine.
HEADINGS = ("card", "setting", "nodes", "Mbit/s", "s a step", "tokens/s", "speed-up", "data", "load", "note")


def measure(arm: Arm, where: Sequence[DistEnv], given: argparse.Namespace) -> Row | None:
    """None where a rank has failed; it has said why."""
    with tempfile.TemporaryDirectory() as folder:
        task = Task(arm, given.scale, given.mfu, *steps_of(arm, given), Path(folder))
        program = [str(HERE / "wire_rank.py"), task.write()]
        if run_ranks(where[: arm.nodes], program, ENVIRONMENT):
            return None
        ranks = [json.loads((task.folder / f"{rank}.json").read_text()) for rank in range(arm.nodes)]
    return Row(
        arm=arm,
        seconds=[end - begin for begin, end in pairwise(ranks[0]["ends"][: task.steps + 1])],
        waits=lengths(arm, given.mfu),
        sent=given.scale * sum(difference(rank, "sent") for rank in ranks) / arm.nodes / task.steps,
        goodput=goodput(ranks, arm, given.scale),
        load=difference(ranks[0], "busy") / difference(ranks[0], "all"),
        equal=all(rank["equal"] for rank in ranks),
    )


def steps_of(arm: Arm, given: argparse.Namespace) -> tuple[int, int]:
    """That warm up, and that are measured; of rounds each with an exchange."""
    if arm.rival == DILOCO or arm.local_steps:
        return LOCAL_STEPS, LOCAL_STEPS
    usual = STEPS if of.expected_seconds(arm, given.mfu) < LONG else STEPS_OF_LONG_ONES
    return given.warm_up, given.steps or usual


def difference(rank: dict[str, Any], name: str, *kinds: str) -> float:
    """Between the two moments; of what is counted by kind, of these or of all kinds."""
    before, after = (moment[name] for moment in rank["moments"])
    if not isinstance(after, dict):
        return after - before
    return sum(after.get(kind, 0) - before.get(kind, 0) for kind in kinds or after)


def goodput(ranks: Sequence[dict[str, Any]], arm: Arm, scale: int) -> float | None:
    """Of all ranks: what they sent by the time their wire was busy [Mbit/s at full size]. The first round of a leg
    waits for other ranks, not for the wire; so do gradients that leave during the backward pass."""
    if arm.rival or arm.local_steps:
        return None
    kinds = ("gradients", "weights") if arm.delay else ("weights",)
    sent, busy = (sum(difference(rank, name, *kinds) for rank in ranks) for name in ("sent", "wire"))
    return sent * 8 / 1e6 * scale / busy if busy else None


def measure_all(chosen: Sequence[Arm], given: argparse.Namespace) -> list[Row]:
    rows, count = [], 0
    for link, of_link in groupby(sorted(chosen, key=lambda arm: -arm.link), key=lambda arm: arm.link):
        several = list(of_link)
        kbit = round(link * 1000 / given.scale) if given.lab else 0
        with places(max(arm.nodes for arm in several), kbit) as where:
            for arm in several:
                count += 1
                said = "failed"
                if row := measure(arm, where, given):
                    rows.append(row)
                    said = f"{row.step:.2f} s a step, {row.speedup:.2f} times one node, load {row.load:.0%}"
                print(f"{count}/{len(chosen)} {arm}: {said}", flush=True)
    return rows


def best(rows: Sequence[Row]) -> dict[str, Row]:
    """By card: int4 with a delay on five nodes at a gigabit, of one setting that was measured on both cards; encoded
    beforehand only where nothing else was."""
    found: dict[tuple[bool, float], dict[str, Row]] = {}
    for row in rows:
        arm = row.arm
        usual = replace(arm, wire="int4", nodes=5, link=1000, slow=False, rival="", local_steps=0)
        if arm.delay and arm == usual:
            found.setdefault((not arm.encoded_beforehand, arm.delay), {})[arm.card] = row
    whole = {key: of_cards for key, of_cards in found.items() if len(of_cards) == len(CARDS)}
    if not whole:
        return {}
    return whole[max(whole, key=lambda key: (key[0], whole[key][CARDS[0]].speedup))]


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    of_cards = best(rows)
    speedups = [round(of_cards[card].speedup, 3) if of_cards else None for card in CARDS]
    return {
        "bench": "wire",
        "setting": of_cards[CARDS[0]].arm.whole_setting if of_cards else None,
        **dict(zip(("speedup_4090", "speedup_3060"), speedups, strict=True)),
        "evidence": "cpu",
    }


def chosen_arms(given: argparse.Namespace) -> Iterator[Arm]:
    for arm in of.arms(GROUPS if "all" in given.arms else given.arms, given.only):
        if arm.rival == DILOCO and find_spec("torchft") is None:
            print(f"{arm}: left out, for want of torchft (.venv/bin/pip install torchft==0.2.0)")
            continue
        if given.scale > 1:
            yield arm
        if (given.encoded_beforehand or given.scale == 1) and not (arm.rival or arm.local_steps):
            yield replace(arm, encoded_beforehand=True)


def parser() -> argparse.ArgumentParser:
    made, groups = options(__doc__, text=False), [*GROUPS, "all"]
    add = made.add_argument
    named = f"of {', '.join(groups)} (default: {' '.join(of.DEFAULT)})"
    add("--lab", action="store_true", help="over the lab's links (root, make lab-up), not loopback")
    add("--arms", nargs="+", choices=groups, default=list(of.DEFAULT), metavar="GROUP", help=named)
    add("--only", nargs="+", default=[], metavar="TEXT", help="of these only arms with a TEXT in their name")
    add("--encoded-beforehand", action="store_true", help="our arms a second time, see above")
    divisor = "what elements and link are divided by: a power of 4 up to 4,096 (16)"
    add("--scale", type=int, default=16, choices=[4**power for power in range(7)], metavar="N", help=divisor)
    add("--mfu", type=float, help="of both cards, in place of what the plan assumes")
    add("--warm-up", type=int, default=3, metavar="STEPS", help="that are not measured (3)")
    add("--steps", type=int, help=f"that are ({STEPS}, {STEPS_OF_LONG_ONES} of long ones)")
    return made


def main() -> int:
    given, started = parser().parse_args(), time.perf_counter()
    chosen = list(chosen_arms(given))
    rows = measure_all(chosen, given)
    if rows:
        links = "the lab's shaped links" if given.lab else "loopback, not shaped"
        about = f"tensors and links divided by {given.scale}, {links}"
        title = f"gpt2-medium, {rows[0].waits.tokens:,} tokens a step; {about}"
        show(title, HEADINGS, [row.cells(given.lab) for row in rows], left=("setting", "note"))
    of_cards = ", ".join(f"{diloco(card, given.mfu):.2f} ({card})" for card in CARDS)
    print(f"DiLoCo, fp32 every {LOCAL_STEPS} steps, five nodes, 1 Gbit/s: {of_cards} by formula.")
    every = [{**asdict(row), "speedup": row.speedup} for row in rows]
    file = write_results("wire", {"scale": given.scale, "lab": given.lab, "rows": every})
    print(f"{time.perf_counter() - started:.0f} s; every figure: {file}")
    print(json.dumps(last_line(rows)))
    return 0 if len(rows) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
