"""How the sequences of a step are divided among the ranks: as the settings say, or by measured speeds. No torch
here."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aura.config import TrainConfig
from aura.errors import ConfigError, reason_of

State = dict[str, Any]


@dataclass(frozen=True)
class ActiveRanks:
    """Which ranks of a launch are in this attempt."""

    launched: int
    ranks: tuple[int, ...]  # as the launch counts them, in their order
    step_tokens: int = 0  # of a step of the run, which began in another launch; 0: as the settings say

    @classmethod
    def all(cls, launched: int) -> ActiveRanks:
        """With AURA_STEP_TOKENS, which a launch says. Raises ConfigError."""
        tokens = os.environ.get("AURA_STEP_TOKENS") or "0"
        if not tokens.isdecimal():
            raise ConfigError("step_tokens_wrong", value=tokens)
        return cls(launched, tuple(range(launched)), int(tokens))

    def of_launch(self, config: TrainConfig) -> TrainConfig:
        """The settings of all ranks of the launch, with the step that the run has. Raises ConfigError."""
        if self.step_tokens in (0, tokens_of_step(config, self.launched)):
            return config
        return replace(config, global_batch_tokens=self.step_tokens)

    def shared(self, config: TrainConfig) -> TrainConfig:
        """What they compute together: the step that all ranks of the launch would. Raises ConfigError."""
        return self.of_launch(config).among(self.launched, self.ranks)


def tokens_of_step(config: TrainConfig, ranks: int) -> int:
    """Raises ConfigError."""
    return sum(config.shares(ranks)) * config.seq_len


class Division:
    """The same on every rank. Steps are counted from 1."""

    def __init__(self, config: TrainConfig, nodes: list[str]) -> None:
        """nodes: of every rank."""
        self.nodes, self.by_speed = nodes, config.balance == "speed" and len(nodes) > 1
        self.first = config.shares(len(nodes))
        # Windows of a micro-batch of every rank.
        # torch draws for a whole tensor: what is dropped of one sequence follows from its position alone only where it
        # is computed alone. So the same sequences learn the same, whoever computes them, and in whatever company.
        self.sizes = [1] * len(nodes) if config.dropout else config.batch_sizes(len(nodes))
        self.is_measured = False  # these nodes have heard of each other how fast they are
        self.from_step = {1: self.first}

    def of_step(self, step: int) -> list[int]:
        """Windows of every rank."""
        return self.from_step[max(first for first in self.from_step if first <= step)]

    def change(self, step: int, shares: list[int]) -> None:
        """From `step` on, which no rank has begun."""
        self.from_step[step] = shares

    def fits(self, shares: Any) -> bool:
        """Can they be those of these ranks?"""
        return (
            isinstance(shares, list)
            and len(shares) == len(self.first)
            and all(type(share) is int and share > 0 for share in shares)
            and sum(shares) == sum(self.first)
        )

    def state(self, step: int) -> State:
        """What is still to come after `step`; empty where the settings say all of it."""
        if not self.by_speed:
            return {}
        later = {step + 1: self.of_step(step + 1)}
        later |= {first: shares for first, shares in self.from_step.items() if first > step}
        return {"nodes": self.nodes, "is_measured": self.is_measured, "from_step": later}

    def load(self, state: State, step: int) -> None:
        """`state` after `step`. Speeds are those of nodes: where others take part, the ranks begin anew."""
        if self.by_speed and state and state["nodes"] == self.nodes:
            from_step = {int(first): shares for first, shares in state["from_step"].items()}
            if all(self.fits(shares) for shares in from_step.values()):
                self.is_measured, self.from_step = state["is_measured"], from_step
                return
        self.from_step = {step + 1: self.first}


def shares_by_speed(seconds_per_window: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """Windows of every rank, `total` together, so that the slowest one is done as early as can be.

    sizes: sequences of a micro-batch of every rank, which has at least one. They are whole, as torch.compile makes
    kernels for each length, but for one: where `total` asks for it the last one of a rank is shorter, and counts as a
    whole one. (Of several ranks, where one whole one of each would be more than `total`.)
    """
    assert len(sizes) <= total, "a rank would get nothing"

    def seconds(rank: int, sequences: int) -> float:
        return sequences * seconds_per_window[rank]

    ranks, shares = range(len(sizes)), list(sizes)
    while sum(shares) < total:
        # The next micro-batch to whom it ends first: so no other order of giving ends earlier.
        soonest = min(ranks, key=lambda rank: seconds(rank, shares[rank] + sizes[rank]))
        shares[soonest] += sizes[soonest]
    while over := sum(shares) - total:
        spare = [(share - 1) % size for share, size in zip(shares, sizes, strict=True)]
        able = [rank for rank in ranks if spare[rank] >= over] or [rank for rank in ranks if spare[rank]]
        last = max(able, key=lambda rank: seconds(rank, shares[rank]))
        shares[last] -= min(over, spare[last])
    return shares


def slowest(seconds_per_window: Sequence[float], shares: Sequence[int]) -> float:
    """Seconds that a step computes."""
    return max(each * share for each, share in zip(seconds_per_window, shares, strict=True))


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """Every line of a record of them (balance.py). Raises ConfigError."""
    try:
        words = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("shares_unreadable", path=path, reason=reason_of(error)) from None
    lines = []
    for number, line in enumerate(words, 1):
        if (decision := decision_of(line)) is None:
            raise ConfigError("shares_line_wrong", path=path, number=number)
        lines.append(decision)
    return lines


def decision_of(line: str) -> dict[str, Any] | None:
    """A line of such a record; None where it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int and "shares" in found else None
