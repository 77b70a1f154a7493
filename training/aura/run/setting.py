"""`strategy=auto` at the start of a run: what is measured, decided, said, and written to plan.json.

What has been decided stays: a later start with as many ranks goes on with it, since the same plan gives the same bits.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

from aura.config import TrainConfig
from aura.corpus.windows import Windows
from aura.durable import write_atomically
from aura.errors import reason_of
from aura.model.language_model import LanguageModel
from aura.plan.candidates import Cluster, Decision, decide, exchanging
from aura.plan.memory import CODE_BITS
from aura.plan.plan import ranks_of
from aura.plan.replay import PLAN, Replay, parse
from aura.plan.step_time import Coding, Work
from aura.run import measure
from aura.run.batches import Batches
from aura.run.division import Division
from aura.run.run import Run
from aura.texts.console import text


def with_setting(run: Run, model: LanguageModel, windows: Windows) -> tuple[Run, list[str]]:
    """The run with what `auto` stands for, and what there is to say of it. Every rank has to ask at the same time.
    Raises CollectiveFailed."""
    if run.config.strategy != "auto":
        return run, []
    if len(set(run.ranks.nodes)) == 1:
        why = text("setting", name=text("candidate_exact"), why=text("setting_one_node"))
        exact = exchanging(run.config, "fp32", 0.0)
        return replace(run, config=exact), [why] if run.place.world_size > 1 else []
    replay, lines = _decided_before(run)
    if replay is None:
        replay, lines = _decided_now(run, model, windows)
    if run.saves:
        _write(run, replay)
    return replace(run, config=replay.applied_to(run.config), setting=replay), lines


def _decided_before(run: Run) -> tuple[Replay | None, list[str]]:
    """By the lowest rank that knows it: a new disk does not."""
    file, data = run.directory / PLAN, b""
    config, world_size = run.config, run.place.world_size
    try:
        data = file.read_bytes()
        before = parse(data)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        run.say(text("setting_damaged", file=file, error=reason_of(error)))
        data = b""
    else:
        if not before.is_of(config, world_size):
            data = b""
            if run.leads:
                now = {"ranks": world_size, "sequences": sum(config.shares(world_size))}
                was = {"before": before.ranks, "sequences_before": before.sequences}
                tolerances = {"tolerance_before": before.loss_tolerance, "tolerance": config.loss_tolerance}
                run.say(text("setting_anew", file=file, **now, **was, **tolerances))
    there = [row[0] for row in run.ranks.gather([len(data)])]
    if not any(there):
        return None, []
    source = next(rank for rank, length in enumerate(there) if length)
    replay = parse(run.ranks.broadcast_bytes(data, source))
    return replay, [text("setting_again", name=f"wire={replay.wire} delay={replay.delay:g}", file=file)]


def _decided_now(run: Run, model: LanguageModel, windows: Windows) -> tuple[Replay, list[str]]:
    cluster = _measured(run, model, windows)
    decision = decide(run.config, cluster)
    # The same on all ranks by itself; but one that is wrong about it would wait for ever.
    said = json.dumps(_as_replay(run.config, cluster, decision).as_json()).encode()
    slowest = max(work.seconds for work in cluster.works)
    mbit = cluster.speed * 8 / 1e6
    measured = text("measured_for_auto", speed=mbit, seconds=slowest)
    return parse(run.ranks.broadcast_bytes(said, 0)), [measured, *decision.table, decision.reason]


def _measured(run: Run, model: LanguageModel, windows: Windows) -> Cluster:
    config, ranks = run.config, run.ranks
    nodes = len(set(ranks.nodes))
    batches = Batches(windows, config, Division(config, ranks.nodes), run.place.rank, run.device)
    batches.begin_step(1)
    own = measure.micro_batch_seconds(run, model, batches)
    coding = measure.codings(run.device)
    # Where the share is no multiple of the micro-batch, the last one is shorter.
    count = math.ceil(batches.share / batches.size)
    seconds = own * batches.share / batches.size / count
    row = [count, measure.nanoseconds(seconds), batches.share]
    # Attoseconds: an element takes some nanoseconds.
    row += [round(part * 1e18) for wire in CODE_BITS for part in (coding[wire].encode, coding[wire].decode)]
    rows = ranks.gather(row)
    slowest = [max(column) / 1e18 for column in list(zip(*rows, strict=True))[3:]]
    return Cluster(
        nodes=nodes,
        works=tuple(
            Work(count, time / 1e9, share * config.seq_len / count) for count, time, share, *_ in rows
        ),
        speed=measure.link_speed(ranks),
        codings={wire: Coding(*slowest[2 * place : 2 * place + 2]) for place, wire in enumerate(CODE_BITS)},
        rooms=tuple(rank.room for rank in ranks_of(config, run.devices, nodes, None)),
        on_gpu=any(device.is_gpu for device in run.devices),
    )


def _as_replay(config: TrainConfig, cluster: Cluster, decision: Decision) -> Replay:
    ranks = len(cluster.works)
    return Replay(
        wire=decision.chosen.wire,
        delay=decision.chosen.delay,
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


def _write(run: Run, replay: Replay) -> None:
    """A full disk of one node does not end a run."""
    path = run.directory / PLAN
    try:
        write_atomically(path, replay.as_json())
    except OSError as error:
        run.say(text("setting_not_written", path=path, error=reason_of(error)))
