"""What `make bench-wire` measures: arms, and how long their waits are by the plan."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from aura.config import TrainConfig, resolve
from aura.families.family import rows
from aura.plan import gpus
from aura.plan.flops import flops_per_token, update_flops, utilisation
from aura.plan.plan import plan_for
from aura.plan.shapes import shape_of

PRESET = "gpt2-medium"
# 510 sequences of 1,024 tokens are 522,240 tokens. On 5, 2 and 1 nodes equal shares, on 5 of 17 micro-batches, so that
# the late part of a step can be chosen finely; both cards have room for larger ones.
SEQUENCES, MICRO_BATCH = 510, 6
# With a node that has a quarter of the others' speed: shares of 120 and 30, 30 micro-batches for everybody
SLOW, MICRO_BATCHES_WITH_SLOW = 4, (4, 1)
CARDS = ("RTX 4090", "RTX 3060")
MEMORY_SPEED = {"RTX 4090": 1008e9, "RTX 3060": 360e9}  # bytes/s, NVIDIA's specifications
DDP, DILOCO = "DDP", "DiLoCo"
# DiLoCo (Douillard et al., 2023, arXiv 2311.08105) exchanges once in so many steps; the papers have 30 to 500.
LOCAL_STEPS = 30
# Of the guide's step, 163,840 tokens: what rounds are for. So many steps by oneself take a minute there.
SEQUENCES_OF_GUIDE = 160


@dataclass(frozen=True)
class Arm:
    card: str
    wire: str
    delay: float = 0.0
    nodes: int = 5
    link: float = 1000  # Mbit/s
    slow: bool = False  # the last node has a quarter of the others' speed
    rival: str = ""  # "DDP": torch's DistributedDataParallel; "DiLoCo": torchft's
    encoded_beforehand: bool = False
    local_steps: int = 0  # of the strategy `rounds`, with the guide's step

    @property
    def setting(self) -> str:
        """What one can choose: the same on every card, link and number of nodes."""
        if self.rival:
            return f"{self.rival} {self.wire}"
        if self.local_steps:
            return f"rounds of {self.local_steps}, {self.wire}, {self.delay:g} of one late"
        return f"{self.wire}, {self.delay:g} of a step late" if self.delay else f"{self.wire}, strict"

    @property
    def whole_setting(self) -> str:
        return self.setting + (", encoded beforehand" if self.encoded_beforehand else "")

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes, one slow" if self.slow else f"{self.nodes} nodes"
        link = f"{self.link / 1000:g} Gbit/s" if self.link >= 1000 else f"{self.link:g} Mbit/s"
        return ", ".join([self.card, self.whole_setting, nodes, link])

    def config(self) -> TrainConfig:
        """At full size."""
        settings = {
            "optimizer": "muon",
            "precision": "bf16",
            "batch_size": MICRO_BATCH,
            "wire": self.wire,
            "delay": self.delay,
            # What is skipped where bytes were encoded beforehand
            "predicted_weights": not self.encoded_beforehand,
        }
        if self.slow:
            usual, slow = MICRO_BATCHES_WITH_SLOW
            settings["rank_batch_sizes"] = ",".join(map(str, [usual] * (self.nodes - 1) + [slow]))
        sequences = SEQUENCES
        if self.local_steps:
            settings |= {"strategy": "rounds", "local_steps": self.local_steps}
            sequences = SEQUENCES_OF_GUIDE
        settings["global_batch_tokens"] = sequences * resolve(PRESET).seq_len
        return resolve(PRESET, settings)

    @property
    def slowness(self) -> list[int]:
        """Of every node: how many times as long as on the others everything takes."""
        return [1] * (self.nodes - 1) + [SLOW if self.slow else 1]


@dataclass(frozen=True)
class Task:
    """What wire.py gives to a rank."""

    arm: Arm
    scale: int
    mfu: float | None
    warm_up: int
    steps: int
    folder: Path  # for what the ranks have measured

    @classmethod
    def read(cls, text: str) -> Task:
        values = json.loads(text)
        return cls(**values | {"arm": Arm(**values["arm"]), "folder": Path(values["folder"])})

    def write(self) -> str:
        return json.dumps(asdict(self), default=str)


def scaled(config: TrainConfig, scale: int) -> TrainConfig:
    """A model with a `scale`-th of the elements in every matrix (scale: the square of a power of two, up to 4,096)."""
    side = math.isqrt(scale)
    return replace(
        config,
        d_model=config.d_model // side,
        seq_len=config.seq_len // side,
        vocab_size=rows(config) // side,
        vocab_multiple=1,
        global_batch_tokens=0,
        rank_batch_sizes="",
    )


@dataclass(frozen=True)
class Lengths:
    """Of the waits [seconds]."""

    micro_batches: tuple[tuple[float, ...], ...]  # of every node
    update: tuple[float, ...]  # of every node: Newton-Schulz of what it owns, or of everything
    whole_update: float  # on one node that owns everything
    alone: float  # a step of one node, without any framework
    tokens: int  # of a step
    shares: tuple[int, ...]  # sequences of every node
    moving: tuple[float, ...]  # of every node: a byte per parameter through its card's memory

    @property
    def of_a_step(self) -> float:
        """On the slowest node, with a wire that takes no time."""
        nodes = zip(self.micro_batches, self.update, strict=True)
        return max(sum(micro_batches) + update for micro_batches, update in nodes)

    @property
    def ceiling(self) -> float:
        """The speed-up with a wire that takes no time."""
        return self.alone / self.of_a_step


def lengths(arm: Arm, mfu: float | None = None) -> Lengths:
    """As the plan computes them; `mfu` in place of what it assumes for the card."""
    config, card = arm.config(), gpus.find(arm.card)
    speed = card.peak[config.precision] * utilisation(config, card, mfu)[0]
    sequence, whole_update = config.seq_len * flops_per_token(config) / speed, update_flops(config) / speed
    shares, owners = config.shares(arm.nodes), 1 if arm.local_steps else arm.nodes
    return Lengths(
        micro_batches=tuple(
            tuple(sequence * slower * count for count in micro_batches(share, size))
            for share, size, slower in zip(shares, config.batch_sizes(arm.nodes), arm.slowness, strict=True)
        ),
        update=tuple(whole_update / owners * slower for slower in arm.slowness),
        whole_update=whole_update,
        alone=sequence * sum(shares) + whole_update,
        tokens=sum(shares) * config.seq_len,
        shares=tuple(shares),
        moving=tuple(shape_of(config).stored / MEMORY_SPEED[arm.card] * slower for slower in arm.slowness),
    )


def micro_batches(share: int, size: int) -> list[int]:
    """As run/batches.py cuts a share [sequences]."""
    return [stop - start for start, stop in pairwise([*range(0, share, size), share])]


def wire_seconds(arm: Arm) -> float:
    """Both legs of a step, with what a link carries of data."""
    return plan_for(arm.config(), arm.nodes, gpus.find(arm.card), link_mbit=arm.link).communication_seconds


def expected_seconds(arm: Arm, mfu: float | None = None) -> float:
    """Of a step that exchanges something, before anything is measured."""
    compute, wire = lengths(arm, mfu).of_a_step, wire_seconds(arm)
    return max(compute, wire, (1 - arm.delay) * compute + wire)


def diloco(card: str, mfu: float | None) -> float:
    """The speed-up by formula, of five nodes at 1 Gbit/s: every node updates everything in every step, and once in
    LOCAL_STEPS all exchange what has changed in fp32 and wait for it."""
    arm = Arm(card, "fp32")
    waits = lengths(arm, mfu)
    compute = waits.of_a_step - max(waits.update) + waits.whole_update
    return waits.alone / (compute + wire_seconds(arm) / LOCAL_STEPS)


def of_both(*arms: tuple[str, float]) -> list[Arm]:
    return [Arm(card, wire, delay) for card in CARDS for wire, delay in arms]


FAST, SLOW_CARD = CARDS
LATE = 0.9  # enough for int4 on an RTX 4090 at 1 Gbit/s
GROUPS: dict[str, list[Arm]] = {
    "delay": [*(Arm(FAST, "int4", delay) for delay in (0.5, 0.75, LATE, 1.0)), Arm(SLOW_CARD, "int4", LATE)],
    "strict": [Arm(FAST, "int4")],
    "ddp": [Arm(FAST, "bf16", rival=DDP)],
    "formats": [*of_both(("int8", 0), ("bf16", 0), ("fp32", 0), ("int8", 1.0)), Arm(SLOW_CARD, "int4")],
    "3060": [Arm(SLOW_CARD, "int4", delay) for delay in (0.5, 0.75, 1.0)],
    "rivals": [
        Arm(FAST, "fp32", rival=DDP),
        *(Arm(SLOW_CARD, wire, rival=DDP) for wire in ("bf16", "fp32")),
    ],
    "links": [
        *(Arm(card, "int4", 1.0, link=100) for card in CARDS),  # DDP would take two minutes a step
        *(Arm(FAST, "int4", delay, link=2500) for delay in (0.0, 0.5)),
        Arm(FAST, "bf16", rival=DDP, link=2500),
    ],
    "diloco": [Arm(FAST, "fp32", rival=DILOCO)],
    "rounds": [
        *(Arm(FAST, "int4", delay, local_steps=LOCAL_STEPS) for delay in (0.0, 0.1)),
        *(Arm(FAST, "int4", 0.3333, link=link, local_steps=LOCAL_STEPS) for link in (300, 100)),
    ],
    "nodes": [Arm(FAST, "int4", LATE, nodes=nodes) for nodes in (2, 3)],
    "slow": [Arm(card, "int4", LATE, slow=True) for card in CARDS],
}
DEFAULT = ("delay", "strict", "ddp")  # about ten minutes


def arms(groups: Iterable[str], only: Iterable[str] = ()) -> list[Arm]:
    """Of these groups, each once; `only` those whose name has one of these words in it."""
    found = dict.fromkeys(arm for group in groups for arm in GROUPS[group])
    wanted = list(only)
    return [arm for arm in found if not wanted or any(word in str(arm) for word in wanted)]
