"""balance=speed: every rank takes as many sequences of a step as its speed allows.

After some steps the ranks tell each other how long they compute for a sequence, and all of them draw the same
conclusion. It holds from the step after the next on: with a delay the next one is under way by then, and without one
its first sequences have been read. What is decided depends on clocks, and what rounding does to a sum depends on it.
So each decision is written down (shares.jsonl of rank 0), and what goes on from an older checkpoint takes it from
there.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from aura.cluster.activity import UNCOUNTED
from aura.cluster.ranks import Ranks
from aura.durable import replace_text
from aura.errors import ConfigError, why_not_written
from aura.run.division import Division, decision_of, read_decisions, shares_by_speed, slowest
from aura.run.meter import Meter
from aura.run.progress import Observer, Step
from aura.run.status import Status
from aura.strategy.interface import Strategy
from aura.texts.console import Console, text

RECORD = "shares.jsonl"
AHEAD = 2  # steps from a decision to the first one that it is for
# Measured steps before a decision. Until the first one unequal ranks wait in every step, so that it comes as soon as
# two steps say the same, after those that compile kernels and fill caches.
FEWEST = 2
# Steps between two others: a GPU gets hot, another program comes and goes, and the median of so many steps does not
# see one that was odd.
EVERY = 50
# What is less is within the noise of a measurement, and another length of a micro-batch may have to be compiled.
WORTH = 0.03


@dataclass
class Balance(Observer):
    path: Path  # of the record
    given: Path | None  # another one, to take in place of measuring
    step: int  # after which the attempt goes on
    ranks: Ranks
    strategy: Strategy
    division: Division
    meter: Meter
    speaker: Console
    status: Status

    def __post_init__(self) -> None:
        self.decided: dict[int, list[int]] = {}  # what has been written down, by the step that it is for
        self.measures = True
        self.steps = 0  # of this attempt
        self.measured: deque[float] = deque(maxlen=EVERY)  # seconds for a sequence, by step

    def begin(self) -> None:
        said = b""
        if self.speaker.leads:
            said = json.dumps([self.given is None, self._take_record()]).encode()
        self.measures, decided = json.loads(self.ranks.broadcast_bytes(said, source=0))
        self.decided = {int(step): shares for step, shares in decided.items()}
        self.status.set(shares=self.division.of_step(self.step + 1))

    def after(self, step: Step) -> None:
        seconds = self.meter.take()
        self.steps += 1
        if self.steps > UNCOUNTED:
            self.measured.append(seconds / self.division.of_step(step.number)[self.ranks.rank])
        begins = step.number + AHEAD
        if begins in self.decided:
            self._change(begins, self.decided[begins], text("shares_recorded", path=self.path))
        elif self._is_due(step.number):
            self._decide(begins)
        if {step.number + 1, begins} & self.division.from_step.keys():
            # Another length of a micro-batch may have to be compiled.
            self.strategy.expect_delay()
            self.ranks.activity.expect_delay()
        self.status.set(shares=self.division.of_step(step.number + 1))

    def _is_due(self, step: int) -> bool:
        if not self.measures or len(self.measured) < FEWEST:
            return False
        if step + AHEAD < max(self.decided, default=0):  # nothing was decided then
            return False
        return not self.division.is_measured or step % EVERY == 0

    def _decide(self, begins: int) -> None:
        self.strategy.complete()
        mine = round(statistics.median(self.measured) * 1e9)
        self.measured.clear()
        speeds = [max(1, row[0]) / 1e9 for row in self.ranks.gather([mine])]
        before = self.division.of_step(begins)
        shares = shares_by_speed(speeds, self.division.sizes, sum(before))
        then, now = slowest(speeds, before), slowest(speeds, shares)
        if now > (1 - WORTH) * then:
            shares = before
        if self.speaker.leads:
            self._write_down(begins, shares, speeds)
        rates = " ".join(f"{1 / seconds:.3g}" for seconds in speeds)
        self._change(begins, shares, text("shares_measured", rates=rates, before=then, now=now))

    def _change(self, begins: int, shares: list[int], why: str) -> None:
        before, self.division.is_measured = self.division.of_step(begins), True
        if shares == before:
            return
        self.division.change(begins, shares)
        words = (" ".join(map(str, sequences)) for sequences in (shares, before))
        self.speaker.say_once(text("shares", step=begins, shares=next(words), before=next(words), why=why))

    # The record

    def _take_record(self) -> dict[int, list[int]]:
        """What has been decided for steps that are still to come. The file holds that, and what was before, from here
        on: what other nodes have decided does not count. Raises ConfigError."""
        known, nodes, given = self.step + AHEAD, self.division.nodes, self.given
        content = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        # Of a process that was killed the last line may be broken.
        own = [line for line in map(decision_of, content.splitlines()) if line]
        later = [line for line in (read_decisions(given) if given else own) if line["step"] > known]
        fitting = [line for line in later if self.division.fits(line["shares"])]
        if given and later != fitting:
            odd = next(line for line in later if line not in fitting)
            values = {"step": odd["step"], "ranks": len(nodes), "total": sum(self.division.first)}
            raise ConfigError("shares_do_not_fit", path=given, **values)
        if given:
            fitting = [line | {"nodes": nodes} for line in fitting]
        else:
            fitting = [line for line in fitting if line.get("nodes") == nodes]
        past = [line for line in own if line["step"] <= known]
        self._replace(content, "".join(json.dumps(line) + "\n" for line in [*past, *fitting]))
        return {line["step"]: line["shares"] for line in fitting}

    def _replace(self, old: str, new: str) -> None:
        if new == old:
            return
        try:
            replace_text(self.path, new)
        except OSError as error:
            self.speaker.say(text("log_ends", path=self.path, error=why_not_written(error)))

    def _write_down(self, begins: int, shares: list[int], speeds: list[float]) -> None:
        """Also that nothing changes. A full disk ends no training: what goes on from a checkpoint measures anew."""
        line = {"step": begins, "shares": shares, "nodes": self.division.nodes, "seconds_per_window": speeds}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.speaker.say(text("log_ends", path=self.path, error=why_not_written(error)))
