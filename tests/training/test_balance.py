"""balance=speed: every rank takes as many sequences of a step as its measured speed allows."""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from aura.cluster.activity import Activity
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.run.balance import RECORD
from aura.run.division import Division, read_decisions, shares_by_speed
from aura.run.meter import Meter
from trainers import (
    Fault,
    Trainer,
    at_step,
    before_micro_batch,
    both,
    complete,
    curve,
    send_self,
    start,
    stop_at,
)

# 9 steps of 24 sequences, in micro-batches of two; the first decision, after step 5, is for step 7.
RUN = "--global-batch-tokens 384 --steps 9 --save-every 4 --log-every 3 --lr 1e-2 --validate-every 100 "
SPEED = RUN + "--balance speed "
DELAYED = "--optimizer muon --lr 0.02 --delay 0.5 --wire int4 "


def slow(seconds: float) -> Fault:
    """Every micro-batch that is trained on takes so much longer."""

    return before_micro_batch(lambda model, number: time.sleep(seconds))


# One rank is much slower than the others: what a busy processor takes is little beside that.
KILLED = at_step(8, send_self(signal.SIGKILL))  # by a power cut, say
UNEQUAL = {rank: both(slow(seconds), KILLED) for rank, seconds in enumerate((0.05, 0.05, 0.3))}


def bits(ranks: list[Trainer]) -> set[tuple[bytes, bytes]]:
    return {trainer.files("checkpoint-step-9") for trainer in ranks}


@pytest.mark.parametrize(("settings", "nearly"), [("", 1e-3), (DELAYED, 0.05)])
def test_a_slow_rank_gets_less_of_each_step_and_what_is_decided_stays_so(
    settings: str, nearly: float, corpus: Corpus, tmp_path: Path
) -> None:
    """nearly [nats]: the same sequences in each step, but their gradients are added up in another order; with a delay
    others of them are late, too."""
    killed = start(tmp_path / "run", corpus, 3, SPEED + settings, UNEQUAL)
    for trainer in killed:
        assert trainer.end() in (75, -signal.SIGKILL), trainer.text
    record = tmp_path / "run/node0/run" / RECORD
    content = record.read_text()
    (decision,) = read_decisions(record)
    shares = decision["shares"]
    assert decision["step"] == 7 and sum(shares) == 24
    assert shares[2] < min(shares[:2]), decision
    words = f"From step 7 on the ranks take {' '.join(map(str, shares))} sequences of each step, before that 8 8 8"
    assert f"{words}: measured" in killed[0].text
    # From step 4 on. Nobody is slow any more when it comes to what step 5 has decided.
    with record.open("a") as file:
        file.write('{"step": 9, "sha')  # what a kill may leave
    again = complete(start(tmp_path / "run", corpus, 3, SPEED + settings))
    assert "Continuing after step 4." in again[0].text and f"{words}: so says" in again[0].text
    assert record.read_text() == content
    assert [trainer.status["shares"] for trainer in again] == [shares] * 3
    given = f"{SPEED}{settings}--shares-from {record}"
    straight = complete(start(tmp_path / "straight", corpus, 3, given, {0: slow(0.02)}))
    assert read_decisions(straight[0].run_dir / RECORD) == [decision]
    assert bits(again) == bits(straight) and len(bits(again)) == 1
    equal = complete(start(tmp_path / "equal", corpus, 3, RUN + settings))
    assert straight[0].done["tokens_seen"] == equal[0].done["tokens_seen"] == 9 * 384
    assert curve(straight[0]) == pytest.approx(curve(equal[0]), abs=nearly)
    assert bits(straight) != bits(equal)


def test_a_checkpoint_holds_the_shares_and_other_ranks_begin_anew(corpus: Corpus, tmp_path: Path) -> None:
    shares = tmp_path / "given.jsonl"
    shares.write_text('{"step": 3, "shares": [10, 8, 6]}\n{"step": 6, "shares": [12, 10, 2]}\n')
    settings = f"{SPEED}--shares-from {shares}"
    straight = complete(start(tmp_path / "straight", corpus, 3, settings))
    stopped = stop_at(3, tmp_path / "stopped", corpus, 3, settings)
    state = stopped[0].state("interrupt-step-4")["division"]
    assert state["from_step"] == {"5": [10, 8, 6], "6": [12, 10, 2]}
    record = tmp_path / "stopped/node0/run" / RECORD
    assert [line["step"] for line in read_decisions(record)] == [3, 6]
    record.unlink()  # nothing of it is needed: what was decided before the checkpoint is in it
    again = complete(start(tmp_path / "stopped", corpus, 3, SPEED))
    assert bits(again) == bits(straight)
    (alone,) = complete(start(tmp_path / "stopped", corpus, 1, SPEED + "--steps 10"))
    assert alone.state("checkpoint-step-10")["division"] == {}
    complete(start(tmp_path / "stopped", corpus, 2, SPEED + "--steps 12"))
    state = json.loads((tmp_path / "stopped/node1/run/checkpoints/checkpoint-step-12/state.json").read_text())
    anew = {"nodes": ["node0", "node1"], "is_measured": False, "from_step": {"13": [12, 12]}}
    assert state["division"] == anew


def test_shares_are_those_of_an_exhaustive_search() -> None:
    numbers = random.Random(0)
    for _ in range(300):
        ranks = numbers.randint(1, 4)
        sizes = [numbers.randint(1, 4) for _ in range(ranks)]
        seconds = [numbers.choice((1.0, 1.5, 2.0, 4.0, 7.3)) for _ in range(ranks)]
        total = numbers.randint(ranks, 14)

        def slowest(shares: Sequence[int], sizes: list[int] = sizes, seconds: list[float] = seconds) -> float:
            ranks = zip(shares, sizes, seconds, strict=True)
            return max(math.ceil(share / size) * size * each for share, size, each in ranks)

        found = shares_by_speed(seconds, sizes, total)
        assert sum(found) == total and min(found) > 0
        possible = itertools.product(range(1, total + 1), repeat=ranks)
        best = min(slowest(shares) for shares in possible if sum(shares) == total)
        assert slowest(found) == pytest.approx(best), (seconds, sizes, total, found)
        short = [share for share, size in zip(found, sizes, strict=True) if share % size]
        assert len(short) <= 1 or sum(sizes) > total


def test_shares_of_five_gpus() -> None:
    assert shares_by_speed([1, 1, 1, 1, 1], [8] * 5, 480) == [96] * 5
    # One GPU at a quarter of the speed: 124 sequences' time in place of 412.
    assert shares_by_speed([1, 1, 1, 1, 4], [4] * 5, 512) == [124, 120, 120, 120, 28]
    # The last micro-batch of whom would end last is the shorter one.
    assert shares_by_speed([1, 1, 1], [4, 4, 4], 21) == [5, 8, 8]
    # However slow it is, it has work.
    assert shares_by_speed([1, 1, 1000], [2, 2, 2], 20) == [10, 8, 2]
    assert shares_by_speed([1, 1, 1000], [8, 8, 8], 20) == [8, 8, 4]


def test_what_a_division_takes_over() -> None:
    config = resolve("gpt2", {"global_batch_tokens": 24 * 1024, "balance": "speed"})
    one = Division(config, ["a", "b", "c"])
    assert one.of_step(1) == one.of_step(50) == [8, 8, 8]
    one.is_measured = True
    some, less = [10, 10, 4], [11, 11, 2]
    one.change(7, some)
    one.change(52, less)
    assert [one.of_step(step) for step in (6, 7, 51, 52)] == [[8, 8, 8], some, some, less]
    state = json.loads(json.dumps(one.state(50)))
    same, others = Division(config, ["a", "b", "c"]), Division(config, ["a", "b", "d"])
    same.load(state, 50)
    assert [same.of_step(step) for step in (51, 52)] == [some, less]
    others.load(state, 50)
    assert others.of_step(51) == [8, 8, 8]
    assert same.is_measured and not others.is_measured
    for wrong in ([8, 8], [8, 8, 9], [12, 12, 0], [12, 8.0, 4], "8 8 8", None):
        assert not one.fits(wrong), wrong


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waiting_for_others_is_not_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Event:
        """Of a GPU that is as quick as the host."""

        def __init__(self, of: torch.device, enable_timing: bool) -> None:
            assert enable_timing and of.type == device

        def record(self) -> None:
            self.at = now

        def elapsed_time(self, later: Event) -> float:
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(torch, "Event", Event)
    activity = Activity()
    meter = Meter(torch.device(device), activity)
    meter.begin_step()
    now += 1
    with activity.waiting():  # for the weights of a layer
        now += 10
    now += 2
    meter.end_step()
    now += 100
    meter.begin_step()  # with a delay the one before is still to be settled
    now += 4
    with meter.paused():
        assert meter.take() == pytest.approx(3)
        now += 1000
    now += 8
    meter.end_step()
    assert meter.take() == pytest.approx(12)


def test_a_record_that_is_of_no_use_ends_all_ranks(corpus: Corpus, tmp_path: Path) -> None:
    file = tmp_path / "shares.jsonl"
    with pytest.raises(ConfigError, match=r"shares\.jsonl cannot be read \(No such file or directory\)"):
        read_decisions(file)
    file.write_text('{"step": 3, "shares": [8, 8, 9]}\n')
    for trainer in start(tmp_path / "run", corpus, 3, f"{SPEED}--shares-from {file}"):
        assert trainer.end() == 64, trainer.text
        assert "what it says of step 3 does not divide 24 sequences among 3 ranks" in trainer.text
    file.write_text('{"step": 3, "shares": [8, 8, 8]}\nnothing\n')
    (trainer,) = start(tmp_path / "early", corpus, 1, f"{SPEED}--shares-from {file}")
    assert trainer.end() == 64
    assert "line 2 is no line of a shares.jsonl" in trainer.text
    assert not list(trainer.run_dir.glob("rank-*"))  # it has not begun
    (trainer,) = start(tmp_path / "equal", corpus, 1, f"{RUN}--shares-from {file}")
    assert trainer.end() == 64
    assert "needs balance=speed, this is balance=equal" in trainer.text
