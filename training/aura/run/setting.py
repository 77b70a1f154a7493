"""`strategy=auto` at the start of a run: what is measured, decided, said, and written to plan.json.

What has been decided stays: a later start with as many ranks goes on with it, since the same setting gives the same
bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.durable import write_atomically
from aura.errors import AuraError, reason_of
from aura.plan.setting import Cluster, decide, exchanging, setting_name
from aura.run.division import ActiveRanks
from aura.texts.console import Console, text

PLAN = "plan.json"


@dataclass(frozen=True)
class Chosen:
    """plan.json."""

    wire: str
    delay: float
    delay_after: int
    # For what it was decided
    ranks: int
    sequences: int  # of a step
    # What was predicted
    step_seconds: float
    one_pc_seconds: float  # for the tokens of a step

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        return exchanging(config, self.wire, self.delay, self.delay_after)


@dataclass(frozen=True)
class Setting:
    """What the run exchanges from here on, how `auto` has come to it, and what there is to say of that."""

    config: TrainConfig
    chosen: Chosen | None = None  # by what has been measured
    lines: tuple[str, ...] = ()


def setting_of(
    config: TrainConfig,
    ranks: Ranks,
    active_ranks: ActiveRanks,
    directory: Path,
    saves: bool,
    speaker: Console,
    measured: Callable[[], Cluster],
) -> Setting:
    """What `auto` stands for. It is decided once for all ranks of a launch, by those that are there. Every rank has to
    ask at the same time. Raises CollectiveFailed."""
    if config.strategy != "auto":
        return Setting(config)
    if len(set(ranks.nodes)) == 1:
        why = text("setting", name=text("candidate_exact"), why=text("setting_one_node"))
        return Setting(exchanging(config, "fp32", 0.0), lines=(why,) if ranks.world_size > 1 else ())
    file, launched = directory / PLAN, active_ranks.launched
    sequences = sum(active_ranks.of_launch(config).shares(launched))
    own = _read(file, config, (launched, sequences), speaker)
    told = [one["chosen"] for one in ranks.all_of({"chosen": asdict(own) if own else None})]
    if before := next(filter(None, told), None):  # of the lowest rank that knows it: a new disk does not
        chosen = Chosen(**before)
        name = setting_name(chosen.wire, chosen.delay, chosen.delay_after)
        lines = [text("setting_again", name=name, file=file)]
    else:
        cluster = measured()
        decision = decide(active_ranks.shared(config), cluster)
        one = decision.chosen
        times = {"step_seconds": one.step_seconds, "one_pc_seconds": decision.one_pc_seconds}
        chosen = Chosen(one.wire, one.delay, one.delay_after, launched, sequences, **times)
        # The same on all ranks by itself; but one that is wrong about it would wait for ever.
        chosen = Chosen(**ranks.all_of(asdict(chosen))[0])
        slowest = max(work.seconds for work in cluster.works)
        lines = [text("measured_for_auto", speed=cluster.speed * 8 / 1e6, seconds=slowest)]
        lines += [*decision.table, decision.reason]
    if saves:
        try:
            write_atomically(file, asdict(chosen))
        except OSError as error:  # a full disk of one node does not end a run
            speaker.say(text("setting_not_written", path=file, error=reason_of(error)))
    return Setting(chosen.applied_to(config), chosen, tuple(lines))


def _read(file: Path, config: TrainConfig, asked: tuple[int, int], speaker: Console) -> Chosen | None:
    """What the run has begun with, if that was decided for as many ranks and sequences as are `asked` for."""
    try:
        values = json.loads(file.read_bytes())
        before = Chosen(**{name: values[name] for name in Chosen.__dataclass_fields__})
        before.applied_to(config)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AuraError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error
        speaker.say(text("setting_damaged", file=file, error=why))
        return None
    was = (before.ranks, before.sequences)
    if was == asked:
        return before
    words = dict(zip(("ranks", "sequences", "before", "sequences_before"), (*asked, *was), strict=True))
    speaker.say_once(text("setting_anew", file=file, **words))
    return None
