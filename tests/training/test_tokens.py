"""A run whose length and steps are said in tokens: what it learns does not depend on who takes part."""

from __future__ import annotations

import csv
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aura.commands import cli
from aura.config import from_values, preset_names, resolve
from aura.corpus.corpus import Corpus
from aura.corpus.sequences import Order, Sequences
from aura.errors import ConfigError
from aura.optim.schedule import learning_rate
from aura.plan import plan
from aura.plan.gpus import find
from aura.plan.memory import memory_of, settings_that_fit
from aura.run.division import ActiveRanks, Division
from aura.run.progress import Progress
from aura.run.start import loss_scale_of, with_steps
from trainers import Fault, Faults, Trainer, at_step, before, both, complete, curve, send_self, start, stop_at

# 20 steps of 20 sequences of 16 tokens: seven each for two of three ranks, in micro-batches of two and one.
IN_TOKENS = "--tokens 6400 --global-batch-tokens 320 --lr 1e-2"
SHARES = {5: [4, 4, 4, 4, 4], 3: [6, 7, 7], 1: [20]}


def record(folder: Path) -> Faults:
    """Every rank writes down, in the order in which it reads them, the sequences that it trains on."""

    def of_rank(rank: int) -> Fault:
        training: list[int] = []

        def note(sequences: Sequences, indices: Any) -> None:
            # Those that are trained on have an order; those of the validation have none.
            if training and len(sequences) == training[0]:
                with (folder / f"windows-{rank}").open("a") as file:
                    file.write("".join(f"{index}\n" for index in indices))

        def remember(order: Order, sequences: int, seed: int) -> None:
            training[:] = [sequences]

        return both(before(Sequences, "batch", note), before(Order, "__init__", remember))

    folder.mkdir()
    return {rank: of_rank(rank) for rank in range(5)}


def windows_of_steps(folder: Path, shares: list[int], steps: int) -> list[list[int]]:
    """Those of all ranks, by step; a rank may have read ahead."""
    found: list[list[int]] = [[] for _ in range(steps)]
    for rank, share in enumerate(shares):
        read = [int(line) for line in (folder / f"windows-{rank}").read_text().split()]
        for step, sequences in enumerate(found):
            sequences += read[step * share :][:share]
    return found


def rates(trainer: Trainer) -> list[str]:
    """Step and learning rate of every line of the log."""
    with (trainer.run_dir / "training_log.csv").open() as log:
        return [f"{row['step']},{row['lr']}" for row in csv.DictReader(log)]


def test_five_ranks_and_three_see_the_same_windows_and_learn_the_same(corpus: Corpus, tmp_path: Path) -> None:
    """Tolerance: 1e-4 nats at each of 20 steps: the same sums in another order."""
    ends = {}
    for ranks in (5, 3):
        notes = record(tmp_path / f"windows-{ranks}")
        ends[ranks] = complete(start(tmp_path / str(ranks), corpus, ranks, IN_TOKENS, notes))
    order = Order(len(Sequences(corpus, "train", 16)), seed=0)
    expected = [order.at(step * 20, 20).tolist() for step in range(20)]
    for ranks, trainers in ends.items():
        assert windows_of_steps(tmp_path / f"windows-{ranks}", SHARES[ranks], 20) == expected
        assert trainers[0].done["step"] == 20
        assert trainers[0].done["tokens_seen"] == 6400
    (five, *_), (three, *_) = ends.values()
    assert list(curve(three)) == list(range(1, 21))
    assert curve(three) == pytest.approx(curve(five), abs=1e-4)
    assert rates(three) == rates(five)
    assert three.done["validation_loss"] == pytest.approx(five.done["validation_loss"], abs=1e-4)


def test_the_rate_follows_the_tokens_where_a_step_becomes_another_one(corpus: Corpus, tmp_path: Path) -> None:
    """`-e global_batch_tokens=…` on a run that is there: its second half is that of a run with such steps alone."""
    usual = f"{IN_TOKENS} --log-every 1"
    larger = usual.replace("320", "640")
    stop_at(9, tmp_path / "run", corpus, 1, usual)
    (changed,) = complete(start(tmp_path / "run", corpus, 1, larger))
    (straight,) = complete(start(tmp_path / "straight", corpus, 1, larger))
    assert changed.done["step"] == 15 and straight.done["step"] == 10
    last = [[float(line.partition(",")[2]) for line in rates(one)[-4:]] for one in (changed, straight)]
    assert last[0] == pytest.approx(last[1], rel=1e-6)


def test_a_run_keeps_the_step_that_it_began_with_in_launches_of_others(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks, whose step the settings say, then three, then one; as two alone learn. Tolerance: as above."""
    (straight, _) = complete(start(tmp_path / "straight", corpus, 2, "--lr 1e-2"))
    assert json.loads((straight.run_dir / "model_config.json").read_text())["step_tokens"] == 4 * 16
    keep = partial(os.environ.update, AURA_STEP_TOKENS="64")
    seen: list[list[int]] = []
    for shares, asked, ends in (([2, 2], 6, 7), ([1, 1, 2], 12, 13), ([4], None, 20)):
        notes = record(tmp_path / f"windows-{len(shares)}")
        stop = at_step(asked, send_self(signal.SIGTERM)) if asked else both()
        faults = {rank: both(keep, notes[rank], stop) for rank in range(len(shares))}
        ranks = complete(start(tmp_path / "run", corpus, len(shares), "--lr 1e-2", faults))
        seen += windows_of_steps(tmp_path / f"windows-{len(shares)}", shares, ends - len(seen))
        assert ("The step stays 64 tokens" in ranks[0].text) == (len(shares) != 2)
    assert "by the settings it would be 32 with 1 ranks" in ranks[0].text
    order = Order(len(Sequences(corpus, "train", 16)), seed=0)
    assert seen == [order.at(step * 4, 4).tolist() for step in range(20)]
    assert ranks[0].done["tokens_seen"] == straight.done["tokens_seen"] == 20 * 64
    assert curve(ranks[0]) == pytest.approx(curve(straight), abs=1e-4)
    assert set(rates(straight)) <= set(rates(ranks[0])), "it has lines more where it was stopped"
    assert ranks[0].done["config_digest"] == straight.done["config_digest"], "it has been asked for the same"


def test_a_step_that_cannot_be_kept_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    for said, ranks, sentence in (
        ("32", 3, "are 2 sequences of 16; among 3 ranks, rank 0 would get none"),
        ("many", 2, "AURA_STEP_TOKENS='many'"),
    ):
        keep = partial(os.environ.update, AURA_STEP_TOKENS=said)
        for trainer in start(tmp_path / said, corpus, ranks, faults=dict.fromkeys(range(ranks), keep)):
            assert trainer.end() == 64, trainer.text
            assert sentence in trainer.text, trainer.text


def test_a_step_that_does_not_divide_is_shared_as_the_settings_say() -> None:
    config = resolve("gpt2", {"rank_batch_sizes": "8,4,4"})
    kept = ActiveRanks(3, (0, 1, 2), 20 * 1024)
    assert kept.shared(config).shares(3) == [10, 5, 5]
    assert replace(kept, ranks=(0, 2)).shared(config).shares(2) == [13, 7]
    own = ActiveRanks(3, (0, 1, 2), 16 * config.gradient_accumulation_steps * 1024)
    assert own.of_launch(config) is config
    dropout = Division(kept.shared(replace(config, dropout=0.1)), ["a", "b", "c"])
    assert (dropout.first, dropout.sizes) == ([10, 5, 5], [1, 1, 1])


def made(**settings: object) -> Any:
    return resolve("gpt2", {"global_batch_tokens": 20 * 1024, **settings})


def test_shares_are_whole_and_as_equal_as_can_be() -> None:
    for ranks in range(1, 21):
        shares = made().shares(ranks)
        assert sum(shares) == 20 and max(shares) - min(shares) <= 1 and len(shares) == ranks
    assert made(rank_batch_sizes="8,4,4,2,2").shares(5) == [8, 4, 4, 2, 2]
    assert made(rank_batch_sizes="16,8,8,4,4").shares(5) == [8, 4, 4, 2, 2]
    # No micro-batch larger than was asked for, and of a share all of one length, but for a shorter last one.
    assert made(batch_size=8).batch_sizes(1) == [7]
    assert made(batch_size=8).batch_sizes(2) == [5, 5]
    assert made(batch_size=8).batch_sizes(3) == [6, 7, 7]
    assert made(rank_batch_sizes="2,1,1").batch_sizes(3) == [2, 1, 1]


def test_what_is_learnt_does_not_follow_from_the_number_of_ranks() -> None:
    config = made(tokens="2e6", precision="fp16", batch_size=8)
    lengths = {with_steps(config, Progress(), 10**6, sum(config.shares(r))).steps for r in (1, 3, 4, 5)}
    assert lengths == {98}  # 2,000,000 / 20,480
    half = Progress(step=49, windows_seen=49 * 20)
    assert with_steps(config, half, 10**6, 20).steps == 98
    assert with_steps(config, half, 10**6, 40).steps == 49 + 25  # a step takes twice as much from here on
    whole = with_steps(config, Progress(), 10**6, 20)
    assert learning_rate(whole, 97) < learning_rate(whole, 50) < whole.lr
    # The rate follows the tokens: half-way it is that of half-way, however large a step is from there on.
    for per_step in (10, 20, 40):
        left, shift = with_steps(config, half, 10**6, per_step), half.shift(config, per_step)
        rate = learning_rate(replace(left, steps=left.steps + shift), half.step + shift)
        assert rate == pytest.approx(learning_rate(whole, 49), rel=0.03)
    assert half.shift(made(steps=98), 10) == 0
    assert loss_scale_of(config, delayed=False).value == 65536 / (8 * 1024)


def test_more_ranks_than_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"are 20 sequences of 1024; among 21 ranks, rank 0 would get none"):
        made().shares(21)
    with pytest.raises(ConfigError, match=r"among rank_batch_sizes=98,1,1, rank 1 would get none"):
        made(rank_batch_sizes="98,1,1").shares(3)


def test_the_ways_of_the_guides_keep_their_meaning() -> None:
    ours = [preset for preset in preset_names() if preset.startswith("qwen3")]
    for preset in set(preset_names()) - set(ours):
        assert (resolve(preset).tokens, resolve(preset).global_batch_tokens) == (0, 0)
    # Nothing is not said twice, and what a preset has gives way.
    assert resolve("gpt2", {"tokens": 0, "steps": 5, "epochs": 0}).steps == 5
    assert resolve("gpt2", {"steps": "2e3"}).steps == 2000
    values = vars(resolve("gpt2"))
    older = {name: value for name, value in values.items() if name not in ("tokens", "global_batch_tokens")}
    assert from_values(older) == resolve("gpt2")


def test_the_plan_counts_the_same_step_for_any_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --preset gpt2 --gpu 3060 --global-batch-tokens 491520 --tokens 2.5e9 --json".split()
    answers = []
    for nodes in ("5", "3"):
        assert cli.main([*words, "--nodes", nodes]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    five, three = answers
    assert five["tokens_per_step"] == three["tokens_per_step"] == 491_520
    assert five["steps"] == three["steps"] == 5087
    assert three["compute_seconds"] == pytest.approx(five["compute_seconds"] * 160 / 96)
    # The rank with the largest share is the slowest; its micro-batch is what its share needs.
    small = made(batch_size=8)
    counted = plan.plan_for(small, 3, find("3060"))
    assert counted.memory == memory_of(small, 7, on_gpu=True, ranks=3)
    assert counted.sequences_per_step == 20
    (note,) = [note for note in counted.notes if "The link takes" in note]
    assert "raise global_batch_tokens (now 20480)" in note
    keep = {"loss_chunk", "gradient_checkpointing"}
    less = memory_of(small, 3, on_gpu=True).total
    assert settings_that_fit(small, less, on_gpu=True, keep=keep) == {"batch_size": 3}
