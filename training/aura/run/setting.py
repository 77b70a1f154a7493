"""`strategy=auto` at the start of a run: what is measured, decided, said, and written to plan.json.

What has been decided stays: a later start with as many ranks goes on with it, since the same plan gives the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.durable import write_atomically
from aura.errors import reason_of
from aura.plan.candidates import Cluster, Decision, decide, exchanging, setting_name
from aura.plan.replay import PLAN, Replay, parse
from aura.run.division import TakingPart
from aura.texts.console import Console, text


@dataclass(frozen=True)
class Setting:
    """What the run exchanges from here on, how `auto` has come to it, and what there is to say of that."""

    config: TrainConfig
    replay: Replay | None = None  # by what has been measured
    lines: tuple[str, ...] = ()


def setting_of(
    config: TrainConfig,
    ranks: Ranks,
    taking_part: TakingPart,
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
    file = directory / PLAN
    asked = taking_part.of_launch(config)
    found = _decided_before(asked, ranks, taking_part.launched, file, speaker)
    found = found or _decided_now(asked, ranks, taking_part, measured())
    if saves:
        try:
            write_atomically(file, found[0].as_json())
        except OSError as error:  # a full disk of one node does not end a run
            speaker.say(text("setting_not_written", path=file, error=reason_of(error)))
    replay, lines = found
    return Setting(replay.applied_to(config), replay, tuple(lines))


def _decided_before(
    config: TrainConfig, ranks: Ranks, launched: int, file: Path, speaker: Console
) -> tuple[Replay, list[str]] | None:
    """By the lowest rank that knows it: a new disk does not."""
    data = b""
    try:
        data = file.read_bytes()
        before = parse(data)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        speaker.say(text("setting_damaged", file=file, error=reason_of(error)))
        data = b""
    else:
        if not before.is_of(config, launched):
            data = b""
            now = {"ranks": launched, "sequences": sum(config.shares(launched))}
            was = {"before": before.ranks, "sequences_before": before.sequences}
            tolerances = {"tolerance_before": before.loss_tolerance, "tolerance": config.loss_tolerance}
            speaker.say_once(text("setting_anew", file=file, **now, **was, **tolerances))
    there = [row[0] for row in ranks.gather([len(data)])]
    if not any(there):
        return None
    source = next(rank for rank, length in enumerate(there) if length)
    replay = parse(ranks.broadcast_bytes(data, source))
    name = setting_name(replay.wire, replay.delay, replay.delay_after)
    return replay, [text("setting_again", name=name, file=file)]


def _decided_now(
    config: TrainConfig, ranks: Ranks, taking_part: TakingPart, cluster: Cluster
) -> tuple[Replay, list[str]]:
    decision = decide(taking_part.shared(config), cluster)
    # The same on all ranks by itself; but one that is wrong about it would wait for ever.
    said = json.dumps(_as_replay(config, taking_part.launched, cluster, decision).as_json()).encode()
    slowest = max(work.seconds for work in cluster.works)
    mbit = cluster.speed * 8 / 1e6
    measured = text("measured_for_auto", speed=mbit, seconds=slowest)
    return parse(ranks.broadcast_bytes(said, 0)), [measured, *decision.table, decision.reason]


def _as_replay(config: TrainConfig, ranks: int, cluster: Cluster, decision: Decision) -> Replay:
    return Replay(
        wire=decision.chosen.wire,
        delay=decision.chosen.delay,
        delay_after=decision.chosen.delay_after,
        predicted_weights=config.predicted_weights,
        ranks=ranks,
        sequences=sum(config.shares(ranks)),
        loss_tolerance=config.loss_tolerance,
        step_seconds=decision.chosen.step_seconds,
        one_pc_seconds=decision.one_pc_seconds,
        measured={
            "bytes_per_second": cluster.speed,
            "works": [asdict(work) for work in cluster.works],
            "codings": {wire: asdict(coding) for wire, coding in cluster.codings.items()},
        },
    )
