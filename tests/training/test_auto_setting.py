"""`strategy=auto`: the time of a step, the choice; and a run that makes it."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import Corpus
from aura.plan import gpus
from aura.plan.memory import checkpoint_bytes, memory_of, parameter_bytes, wire_bytes
from aura.plan.plan import plan_for
from aura.plan.setting import ROOM, Cluster, cluster_of, decide, exchanging
from aura.plan.step_time import Coding, Work, late_micro_batches, one_pc_seconds, smallest_delay, step_seconds
from aura.run import measure
from aura.strategy import formats
from aura.strategy.codec import BLOCK
from conftest import Aura
from trainers import Fault, before, complete, start, stop_at

MUON = {"optimizer": "muon"}
LATE = MUON | {"delay": 1}
NANO = resolve("gpt2-nano")
HALF_A_MILLION = {"global_batch_tokens": 524_288}
TINY = {"layers": 2, "heads": 2, "d_model": 64, "vocab_size": 512}


def works(*of_ranks: tuple[int, float]) -> list[Work]:
    """(micro-batches, seconds of each); so many tokens that an update takes no time beside them."""
    return [Work(count, seconds, 1e15) for count, seconds in of_ranks]


def speed_for(legs: float, config: TrainConfig, ranks: int) -> float:
    """With which both directions take so long."""
    return 2 * (ranks - 1) * wire_bytes(config) // ranks / legs


def simulated(of_ranks: Sequence[Work], legs: float, delay: float) -> float:
    """Seconds per step: every rank goes through its micro-batches, applies, and waits for what was applied before."""
    late = [late_micro_batches(delay, work.micro_batches) for work in of_ranks]
    applied, there, steps = [0.0] * len(of_ranks), 0.0, 200
    for _ in range(steps):
        for place, work in enumerate(of_ranks):
            apply_update = max(there, applied[place] + late[place] * work.seconds)
            applied[place] = apply_update + (work.micro_batches - late[place]) * work.seconds
        there = max(applied) + legs
    return max(applied) / steps


ROUNDS = {"strategy": "rounds", "local_steps": 40}


@pytest.mark.parametrize(
    ("settings", "of_ranks", "legs", "delay", "step"),
    [
        ({}, [(8, 1.0)] * 2, 0.0, 0.0, 8.0),
        ({}, [(8, 1.0)] * 2, 3.0, 0.0, 11.0),
        ({}, [(8, 1.0)] * 2, 3.0, 0.25, 9.0),  # two late
        ({}, [(8, 1.0)] * 2, 3.0, 0.3, 8.0),  # three
        ({}, [(8, 1.0)] * 2, 20.0, 0.5, 24.0),
        ({}, [(8, 1.0)] * 2, 20.0, 1.0, 20.0),
        ({}, [(1, 2.0)] * 5, 1.0, 0.1, 2.0),  # one of one
        ({}, [(10, 1.0), (5, 2.0)], 8.0, 0.5, 13.0),  # five of ten, three of five: the first waits longer
        ({}, [(10, 1.0), (4, 1.0)], 8.0, 0.5, 13.0),
        # A round is waited for once; who computes less of a step has to wait for longer, and so decides.
        # 75 of 300 steps take 11 s, the others 8.
        ({"delay_after": 75}, [(8, 1.0)] * 2, 3.0, 0.3, 8.75),
        ({"delay_after": 400}, [(8, 1.0)] * 2, 3.0, 0.3, 11.0),
        (ROUNDS, [(8, 1.0)] * 2, 40.0, 0.0, 9.0),  # of 40 steps one exchange
        (ROUNDS, [(8, 1.0)] * 2, 40.0, 0.1, 8.2),  # four steps hide 32 of 40 seconds
        (ROUNDS, [(8, 1.0)] * 2, 40.0, 0.2, 8.0),
        (ROUNDS, [(4, 1.0), (8, 1.0)], 400.0, 0.5, 14.0),  # of 8 s a step: 160 of 400 are hidden
        (ROUNDS, [(4, 1.0), (8, 1.0)], 200.0, 0.5, 9.0),
    ],
)
def test_a_step_takes_as_long_as_a_simulation_of_it(
    settings: dict[str, Any], of_ranks: list[tuple[int, float]], legs: float, delay: float, step: float
) -> None:
    config = resolve("gpt2-nano", MUON | settings | {"delay": delay})
    speed = speed_for(legs, config, len(of_ranks)) if legs else math.inf
    tolerance = 1e-4 if settings else 1e-6
    found = step_seconds(config, works(*of_ranks), len(of_ranks), speed)
    assert found == pytest.approx(step, rel=tolerance)
    if not settings:
        assert simulated(works(*of_ranks), legs, delay) == pytest.approx(step, rel=0.05)


@pytest.mark.parametrize(
    ("of_ranks", "legs", "delay"),
    [
        ([(8, 1.0)], 0.5, 0.125),
        ([(8, 1.0)], 2.0, 0.25),
        ([(25, 1.0)], 6.5, 0.2799),  # 7 / 25, and 0.28 x 25 is a little more than 7
        ([(3, 1.0)], 0.9, 0.3333),
        ([(8, 1.0)], 8.0, 1.0),
        ([(8, 1.0)], 80.0, 1.0),
        ([(10, 1.0), (5, 2.0)], 3.5, 0.4),
    ],
)
def test_the_smallest_delay_that_hides_the_exchange(
    of_ranks: list[tuple[int, float]], legs: float, delay: float
) -> None:
    config = resolve("gpt2-nano", MUON)
    ranks = works(*of_ranks) * (1 if len(of_ranks) > 1 else 2)
    found = smallest_delay(config, ranks, 2, speed_for(legs, config, 2))
    assert found == delay
    k = max(work.micro_batches for work in ranks)
    assert late_micro_batches(found, k) == min(k, math.ceil(legs / ranks[0].seconds))


def test_one_pc_computes_for_all_and_updates_everything() -> None:
    assert one_pc_seconds(NANO, works((4, 1.0), (4, 1.0), (8, 0.5)), 3) == pytest.approx(12)
    assert one_pc_seconds(NANO, works(*[(4, 1.0)] * 4), 2) == pytest.approx(8), "two GPUs each"
    # The plan of a lone PC is the same.
    config = resolve("gpt2-medium", MUON | HALF_A_MILLION)
    card = gpus.find("3060")
    cluster = five(config)
    alone = plan_for(config, 1, card).seconds_per_step
    assert one_pc_seconds(config, cluster.works, 5) == pytest.approx(alone)
    strict = plan_for(config, 5, card)
    assert step_seconds(config, cluster.works, 5, cluster.speed) == pytest.approx(strict.seconds_per_step)


def test_the_plan_of_a_delay_says_what_is_hidden() -> None:
    settings = MUON | HALF_A_MILLION | {"wire": "int4", "delay": 0.11}
    made = plan_for(resolve("gpt2-medium", settings), 5, gpus.find("3060"))
    assert made.exposed_seconds == 0 and made.communication_seconds == pytest.approx(2.45, rel=0.01)
    assert made.seconds_per_step == made.compute_seconds
    assert "of communicating, the rest of which a delay hides" in "\n".join(made.lines())
    less = plan_for(resolve("gpt2-medium", settings | {"delay": 0.05}), 5, gpus.find("3060"))
    assert 0 < less.exposed_seconds < less.communication_seconds
    alone = plan_for(resolve("gpt2-medium", settings), 1, gpus.find("3060"))
    assert alone.memory.delay == alone.exposed_seconds == 0


def test_what_a_delay_takes_of_the_memory() -> None:
    plain = resolve("gpt2-medium", MUON)
    late = replace(plain, wire="int8", delay=0.5)
    d = parameter_bytes(plain) // 4  # elements
    without, with_it = (memory_of(config, 1, on_gpu=True, ranks=5) for config in (plain, late))
    assert with_it.moments - without.moments == pytest.approx(4 * d / 5, rel=1e-3), "the owners' own weights"
    own = memory_of(replace(late, wire="fp32"), 1, on_gpu=True, ranks=5)
    assert own.moments == with_it.moments, "with a delay, whatever the wire"
    not_predicted = memory_of(replace(late, predicted_weights=False), 1, on_gpu=True, ranks=5)
    assert with_it.delay - not_predicted.delay == 2 * d
    assert not_predicted.delay > wire_bytes(late)
    more = checkpoint_bytes(late, 5) - checkpoint_bytes(plain, 5)
    assert more == (4 + 4 + 2) * d, "master, .late and .change"
    assert memory_of(late, 1, on_gpu=True).delay == 0


def five(config: TrainConfig, card: str = "3060", link: float = 1000) -> Cluster:
    cluster = cluster_of(config, [gpus.find(card)] * 5, 5, link)
    assert cluster
    return cluster


@pytest.mark.parametrize(
    ("settings", "card", "link", "wire", "delay", "times"),
    [
        # No exchange hides: the shortest step. The first is the guide's command.
        ({}, "4090", 1000, "int4", 0, 1.41),
        (HALF_A_MILLION, "3060", 1000, "int4", 0, 4.53),
        (MUON, "4090", 1000, "int4", 1, 1.95),
        # The first that hides, of fp32, bf16, int8, int8 late, int4, int4 late
        (MUON | HALF_A_MILLION | {"batch_size": 8}, "4090", 1000, "int4", 0.8461, 4.78),
        (MUON | HALF_A_MILLION, "3060", 1000, "int8", 0.1941, 4.92),
        (HALF_A_MILLION, "3060", 40_000, "fp32", 0, 4.88),
        (HALF_A_MILLION, "3060", 10_000, "bf16", 0, 4.79),
        (MUON, "4090", 2_000_000, "fp32", 0, 4.95),
    ],
)
def test_the_most_exact_one_whose_exchange_hides(
    settings: dict[str, Any], card: str, link: float, wire: str, delay: float, times: float
) -> None:
    config = resolve("gpt2-medium", settings)
    made = decide(config, five(config, card, link))
    chosen = made.chosen
    assert (chosen.wire, chosen.delay) == (wire, delay), made.table
    assert chosen.times_one_pc == pytest.approx(times, abs=0.01)
    delayed = [one for one in made.candidates if one.delay]
    assert bool(delayed) == (settings.get("optimizer") == "muon"), "a delay ruins what AdamW learns"
    assert made.one_pc_seconds == pytest.approx(chosen.step_seconds * chosen.times_one_pc)
    before = made.candidates[: made.candidates.index(chosen)]
    assert not any(one.hides for one in before)
    assert ("most exact one whose exchange hides" in made.reason) == chosen.hides


def test_the_speed_of_every_card_has_to_be_known() -> None:
    assert cluster_of(NANO, [gpus.called("NVIDIA Unheard 1", 2**34)] * 5, 5, 1000) is None


def test_what_does_not_fit_is_not_taken() -> None:
    """A delay needs two more bytes per parameter, and what is on its way."""
    config = resolve("gpt2-medium", MUON | HALF_A_MILLION)
    strict = memory_of(replace(config, wire="int4"), 1, on_gpu=True, ranks=5).total
    made = decide(config, replace(five(config), rooms=(strict / ROOM,) * 5))
    assert (made.chosen.wire, made.chosen.delay) == ("int4", 0)
    assert "; too large for the memory" in made.table[-1]
    # Nor to the last byte: a driver and a desktop take some of it, and it would end hours later.
    chosen = decide(config, five(config)).chosen
    late = exchanging(config, chosen.wire, chosen.delay, chosen.delay_after)
    needs = memory_of(late, 1, on_gpu=True, ranks=5).total
    assert not decide(config, replace(five(config), rooms=(1.03 * needs,) * 5)).chosen.delay
    assert decide(config, replace(five(config), rooms=(1.01 * needs / ROOM,) * 5)).chosen.delay


@pytest.mark.parametrize(
    ("settings", "waits"),
    [({}, 6100 // 20), ({"delay_after": 1000}, 1000), ({"delay_after": 20}, 20), ({"steps": 900}, 75)],
)
def test_a_delay_begins_when_little_is_lost(settings: dict[str, Any], waits: int) -> None:
    """Unless a person says when; a run that is shorter has none."""
    config = resolve("gpt2-medium", MUON | HALF_A_MILLION | settings)
    made = decide(config, five(config))
    assert made.chosen.delay and made.chosen.delay_after == waits
    assert f"delay={made.chosen.delay:g} delay_after={waits}" in made.reason
    short = replace(config, steps=20)
    assert not any(one.delay for one in decide(short, five(short)).candidates)


def test_what_the_codec_takes_counts() -> None:
    config = resolve("gpt2-nano")
    cluster = Cluster(2, tuple(works((1, 0.05), (1, 0.05))), 117.5e6)
    slow = {wire: Coding(1e-7, 1e-7) for wire in ("int8", "int4")}
    assert decide(config, cluster).chosen.wire == "int4"
    assert decide(config, replace(cluster, codings=slow)).chosen.wire == "bf16"


def test_the_guides_command_hears_the_truth(aura_says: Aura) -> None:
    words = ["plan", "--preset", "gpt2-medium", "--gpu", "4090", "--nodes", "5"]
    said = aura_says(*words)
    for line in (
        "  wire=int4: 3.42 s a step, 1.41 times one PC\n",
        "Waiting for the link is 72% of such a step: 5 nodes are 1.41 times one PC. Other trainings",
        "  global_batch_tokens=327680 wire=int4: 2.20 times one PC\n",
        "  global_batch_tokens=655360 wire=int4: 3.05 times one PC\n",
        "  optimizer=muon wire=int4 delay=1 delay_after=305: 1.95 times one PC\n",
        "  strategy=rounds wire=int4 local_steps=30 delay=0.1: 5.00 times one PC",
        "strategy=auto: wire=int4, because no exchange hides",
    ):
        assert line in said
    answer = json.loads(aura_says(*words, "--json"))
    assert [one["wire"] for one in answer["candidates"]] == ["fp32", "bf16", "int8", "int4"]
    assert answer["chosen"] == answer["candidates"][3]
    chosen = json.loads(aura_says(*words, "--strategy", "auto", "--json"))
    assert chosen["seconds_per_step"] == pytest.approx(3.42, abs=0.01)
    assert "candidates" not in json.loads(aura_says(*words[:-2], "--json"))


def as_if(bytes_per_second: float) -> Fault:
    """A link of that speed, and micro-batches of a tenth of a second; what is encoded costs nothing."""

    def apply_update() -> None:
        measure.link_speed = lambda ranks: bytes_per_second  # type: ignore[assignment]
        measure.micro_batch_seconds = lambda *_: 0.1  # type: ignore[assignment]
        measure.codings = lambda *_: {wire: Coding() for wire in ("int8", "int4")}  # type: ignore[assignment]

    return apply_update


RUN = "--strategy auto --optimizer muon --gradient-accumulation-steps 4 --batch-size 1 --steps 8 "
RUN += "--save-every 3 --delay-after 2 "


def test_a_run_chooses_and_goes_on_as_it_has_begun(corpus: Corpus, tmp_path: Path) -> None:
    stopped = stop_at(5, tmp_path / "a", corpus, 3, RUN, before=as_if(1e5))
    said = stopped[0].text
    assert "Measured for strategy=auto: 1 Mbit/s from every node at once, a micro-batch" in said
    # 0.854 s without a delay in two of eight steps, and 0.546 s late
    assert "  wire=int8 delay=1 delay_after=2: 0.623 s a step" in said, said
    assert "strategy=auto: wire=int8 delay=1 delay_after=2, " in said
    plans = [json.loads((trainer.run_dir / "plan.json").read_text()) for trainer in stopped]
    assert plans[0] == plans[1] == plans[2]
    chosen = {name: plans[0][name] for name in ("wire", "delay", "delay_after", "ranks", "sequences")}
    assert chosen == {"wire": "int8", "delay": 1.0, "delay_after": 2, "ranks": 3, "sequences": 12}
    assert stopped[1].status["setting"] == "strategy=sharded wire=int8 delay=1.0 delay_after=2"
    assert any("strategy=auto: wire=int8" in line for line in stopped[0].status["plan"])
    config = stopped[0].state("interrupt-step-6")["config"]
    decided = [config[name] for name in ("strategy", "wire", "delay", "delay_after")]
    assert decided == ["sharded", "int8", 1.0, 2]

    # Now the link is as fast as it is, rank 0 has a new disk, and rank 2 a damaged one.
    (stopped[0].run_dir / "plan.json").unlink()
    (stopped[2].run_dir / "plan.json").write_text('{"wire": "int5"}')
    resumed = complete(start(tmp_path / "a", corpus, 3, RUN))
    assert "strategy=auto: wire=int8 delay=1 delay_after=2, as this run has begun" in resumed[0].text
    assert "Measured for strategy=auto" not in resumed[0].text
    assert "plan.json is damaged" in resumed[2].text
    assert (resumed[0].run_dir / "plan.json").read_bytes() == (stopped[1].run_dir / "plan.json").read_bytes()
    assert "times one PC" in resumed[0].status["outcome"]

    said_itself = RUN.replace("--strategy auto", "--wire int8 --delay 1")
    straight = complete(start(tmp_path / "b", corpus, 3, said_itself))
    assert straight[0].files("checkpoint-step-8") == resumed[0].files("checkpoint-step-8")
    sizes = sum(len(content) for content in straight[0].files("checkpoint-step-8"))
    words = said_itself.replace("--", "").split()
    settings = {name.replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    tiny = {"layers": 1, "heads": 2, "d_model": 32, "seq_len": 16, "vocab_size": 300}
    assert sizes == pytest.approx(checkpoint_bytes(resolve("gpt2-nano", settings | tiny), 3), rel=0.03)

    # A run that is complete says so under the name that it was asked for, also where only its checkpoint does.
    (resumed[1].run_dir / "done.json").unlink()
    again = complete(start(tmp_path / "a", corpus, 3, RUN))
    assert all("is done: 8 steps of this configuration" in trainer.text for trainer in again)

    fewer = complete(start(tmp_path / "a", corpus, 2, RUN.replace("--steps 8", "--steps 10")))
    assert "was decided for 3 ranks and 12 sequences a step; now it is 2" in fewer[0].text
    assert "Measured for strategy=auto" in fewer[0].text
    assert json.loads((fewer[1].run_dir / "plan.json").read_text())["ranks"] == 2
    assert fewer[0].done["step"] == 10


@pytest.mark.parametrize("nodes", ["abc", "aab"])
def test_the_codec_is_measured_with_as_much_as_the_run_encodes_at_once(
    nodes: str, corpus: Corpus, tmp_path: Path
) -> None:
    """Mostly, that is. Where two ranks share a node, each of them a half."""

    def noted(rank: int) -> Fault:
        def apply_update() -> None:
            os.environ["AURA_NODE"] = nodes[rank]
            codings, seen = measure.codings, []
            as_if(1e5)()
            free = measure.codings

            def asked(device: torch.device, elements: Mapping[str, int]) -> Mapping[str, Coding]:
                (tmp_path / f"asked-{rank}").write_text(str(elements["int4"]))
                found = codings(device, elements)
                assert all(coding.encode > 0 < coding.decode for coding in found.values())
                return free(device, elements)

            def encoded(values: torch.Tensor, format_: str) -> None:
                seen.append(len(values) if format_ == "int4" else 0)
                (tmp_path / f"seen-{rank}").write_text(str(statistics.mode(seen)))

            measure.codings = asked  # type: ignore[assignment]
            before(formats, "encode", encoded)()

        return apply_update

    run = RUN.replace("--steps 8", "--steps 2")
    complete(start(tmp_path / "run", corpus, 3, run, {rank: noted(rank) for rank in range(3)}))
    for rank in range(3):
        asked, seen = (int((tmp_path / f"{what}-{rank}").read_text()) for what in ("asked", "seen"))
        assert asked and asked == pytest.approx(seen, abs=BLOCK)


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_one_node_it_is_exact_and_nothing_is_measured(ranks: int, corpus: Corpus, tmp_path: Path) -> None:
    def apply_update() -> None:
        os.environ["AURA_NODE"] = "only"
        measure.micro_batch_seconds = None  # type: ignore[assignment]

    settings = "--strategy auto --steps 2"
    first, *_ = complete(start(tmp_path, corpus, ranks, settings, dict.fromkeys(range(ranks), apply_update)))
    assert not (first.run_dir / "plan.json").exists()
    assert first.state("checkpoint-step-2")["config"]["strategy"] == "sharded"
    assert ("exact (wire=fp32), because all ranks are on one node" in first.text) == (ranks > 1)
