"""What a plan assumes, and what it has to say beside its numbers. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from aura.config import TrainConfig, as_words
from aura.plan.memory import CODE_BITS, has_rounds, is_delayed, settings_that_fit, wire_bytes
from aura.plan.rank import RankPlan
from aura.plan.shapes import parameter_count
from aura.plan.units import in_gib
from aura.recipe import TOKENS_PER_PARAMETER
from aura.texts.console import text


def assumptions(
    config: TrainConfig, of_ranks: Sequence[RankPlan], fullest: RankPlan, is_sent: bool
) -> Iterator[str]:
    if fullest.device.is_gpu:
        yield text("assumed_context")
    if config.dropout:
        yield text("assumed_dropout")
    for rank in _kinds(of_ranks):
        yield from rank.assumptions(config)
    if not all(rank.device.is_gpu for rank in of_ranks):
        yield text("assumed_idle_processor")
    if is_sent:
        yield text(_overlap(config, len(of_ranks)), local_steps=config.local_steps)


def notes(
    config: TrainConfig,
    of_ranks: list[RankPlan],
    fullest_rank: int | None,
    compute: float | None,
    exposed: float,
    tokens: int,
) -> Iterator[str]:
    """tokens: of the run. compute, exposed: seconds of a step."""
    yield from _note_on_memory(config, of_ranks, fullest_rank)
    for rank in _kinds(of_ranks):
        if not rank.peak:
            is_known = rank.device.peak  # in another number format
            yield text("note_no_bf16" if is_known else "note_speed_unknown", device=rank.device.name)
    if (ratio := tokens / parameter_count(config)) < TOKENS_PER_PARAMETER / 2:
        yield text("note_few_tokens", ratio=ratio, enough=TOKENS_PER_PARAMETER)
    yield from _note_on_traffic(compute, exposed, config)


def _kinds(of_ranks: Sequence[RankPlan]) -> list[RankPlan]:
    """One for each kind of device."""
    return list({rank.device.name: rank for rank in of_ranks}.values())


def _overlap(config: TrainConfig, ranks: int) -> str:
    """The sentence that says what goes on beside an exchange."""
    if has_rounds(config, ranks):
        return "assumed_rounds"
    return "assumed_overlap" if is_delayed(config, ranks) else "assumed_no_overlap"


def _note_on_memory(config: TrainConfig, of_ranks: list[RankPlan], fullest_rank: int | None) -> Iterator[str]:
    fullest = of_ranks[fullest_rank or 0]
    if fullest.memory.total <= fullest.room:
        return
    room = in_gib(fullest.room)
    if fullest_rank is None:
        what = text("note_does_not_fit", room=room)
    else:
        what = text("note_rank_does_not_fit", rank=fullest_rank, device=fullest.device.name, room=room)
    rooms = [rank.room for rank in of_ranks]
    changes = settings_that_fit(config, rooms, any(rank.device.is_gpu for rank in of_ranks))
    if changes is None:
        yield text("note_nothing_fits", what=what)
    else:
        yield text("note_this_fits", what=what, settings=as_words(changes))


def _note_on_traffic(compute: float | None, exposed: float, config: TrainConfig) -> Iterator[str]:
    if compute is not None and exposed > 1.1 * compute:
        larger = "global_batch_tokens" if config.global_batch_tokens else "gradient_accumulation_steps"
        yield text("note_traffic", times=exposed / compute, larger=larger, now=getattr(config, larger))
        if config.wire not in CODE_BITS:
            second = exposed / wire_bytes(config)
            strict = replace(config, strategy="sharded", delay=0.0)
            bits = {name: second * wire_bytes(replace(strict, wire=name)) for name in CODE_BITS}
            yield text("note_fewer_bits", **bits)
