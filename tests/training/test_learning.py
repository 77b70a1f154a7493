"""The benchmark of bits and delays does what it says: five_ranks.py beside a loop that is written plainly."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import Corpus, read_corpus
from aura.corpus.sequences import Sequences
from aura.model.gpt import GPT
from aura.optim.muon import optimizer_of
from aura.optim.schedule import learning_rate
from five_ranks import FiveRanks, train
from five_rounds import FiveRounds
from ladder import ARMS as ARMS_OF_LADDER
from ladder import Rung, trend
from lanes import Lane, Lanes
from learning import Alone, Job, Row, timed
from learning_arms import ARMS, GROUPS, RATES, RATES_ALONE, SPEEDS, SYNCHRONOUS
from playing import Setting
from torch import Tensor

STEPS, LR = 5, 0.01
RANKS, MICRO_BATCHES = Setting.ranks, Setting.micro_batches


def config_of(optimizer: str) -> TrainConfig:
    small = {"layers": 1, "d_model": 32, "heads": 2, "seq_len": 8, "vocab_size": 300, "lr": LR}
    return resolve("gpt2-nano", {**small, "steps": STEPS, "optimizer": optimizer, "clip": 0.1})


def drawn(config: TrainConfig) -> list[Tensor]:
    shape = (RANKS, MICRO_BATCHES, config.seq_len + 1)
    torch.manual_seed(0)
    return [torch.randint(0, config.vocab_size, shape) for _ in range(STEPS)]


def plain(
    config: TrainConfig, setting: Setting, batches: list[Tensor]
) -> tuple[dict[str, Tensor], list[float]]:
    """All weights in the end, and the loss of each step; in a step the first micro-batches of all ranks do not know the
    last update. batches: of every step (windows at a time, micro-batches, seq_len + 1)."""
    model = GPT(config)
    optimizer = optimizer_of(model, config)
    names, parameters = zip(*model.named_parameters(), strict=True)
    history, losses = [[p.detach().clone() for p in parameters]] * 3, []
    for step, batch in enumerate(batches):
        long_before, before, now = history[-3:]
        old = [b + setting.predicted * (b - c) for b, c in zip(before, long_before, strict=True)]
        total, loss_sum = [torch.zeros_like(p) for p in parameters], 0.0
        tokens = batch[..., 1:].numel()
        for number in range(batch.shape[1]):
            late = step >= setting.after * config.steps and number < setting.late * batch.shape[1]
            for p, weight in zip(parameters, old if late else now, strict=True):
                p.data.copy_(weight)
            for window in batch[:, number]:
                loss = model.loss_sum(window[None, :-1], window[None, 1:])
                loss_sum += loss.item()
                for sum_, part in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                    sum_ += part / tokens
        losses.append(loss_sum / tokens)
        for p, weight, sum_ in zip(parameters, now, total, strict=True):
            p.data.copy_(weight)
            p.grad = sum_
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step(config.lr)
        history.append([p.detach().clone() for p in parameters])
    return dict(zip(names, history[-1], strict=True)), losses


def flat(config: TrainConfig, setting: Setting) -> Tensor:
    weights, _ = plain(config, setting, drawn(config))
    return torch.cat([weight.view(-1) for weight in weights.values()])


def played(config: TrainConfig, setting: Setting) -> FiveRanks:
    ranks = FiveRanks(config, setting)
    for batch in drawn(config):
        ranks.step(batch, LR)
    return ranks


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting(late=0.25),
        Setting(late=1.0),
        Setting(late=1.0, predicted=True),
        Setting(late=0.5, predicted=True),
        Setting(late=1.0, after=0.6),
    ],
    ids=lambda setting: str(setting.own()),
)
def test_late_micro_batches_compute_on_the_weights_they_know(optimizer: str, setting: Setting) -> None:
    config = config_of(optimizer)
    wanted = flat(config, setting)
    assert (played(config, setting).versions[0] - wanted).abs().max() < 1e-4
    if setting.late:
        # Each of the setting's words shows.
        for name in setting.own():
            other = flat(config, replace(setting, **{name: getattr(Setting, name)}))
            assert (wanted - other).abs().max() > 1e-3, name


@pytest.mark.parametrize("format_", ["bf16", "int8", "int4"])
def test_what_the_codec_loses_of_a_difference_stays_in_the_masters(format_: str) -> None:
    ranks = played(config_of("muon"), Setting(differences=format_))
    lost = (ranks.master - ranks.versions[0]).square().mean().sqrt()
    step = (ranks.versions[0] - ranks.versions[1]).square().mean().sqrt()
    assert 0 < lost < 0.3 * step


def test_lanes_learn_what_five_ranks_learn_one_by_one() -> None:
    """Of a format only the first step: what a code is rounded to is chance, and Muon makes much of it."""
    config = config_of("muon")
    exact = [Setting(), Setting(late=1.0, predicted=True), Setting(late=1.0, predicted=True, after=0.6)]
    coded = replace(exact[2], gradients="int4", differences="int4")
    lanes = Lanes(config, [Lane(exact[0], 0, 0.5), *(Lane(setting, 0) for setting in (*exact, coded))])
    one_by_one = [FiveRanks(config, setting) for setting in (*exact, coded)]
    for step, batch in enumerate(drawn(config)):
        lanes.step(batch[None])
        lr = learning_rate(config, step)
        for ranks in one_by_one:
            ranks.step(batch, lr)
        rows = lanes.versions[0][1:, : lanes.layout.parameters]
        wanted = torch.stack([ranks.versions[0] for ranks in one_by_one])
        torch.testing.assert_close(rows[:-1], wanted[:-1], atol=1e-4, rtol=0)
        if not step:
            moved = (wanted[-1] - wanted[0]).norm()
            assert (rows[-1] - wanted[-1]).norm() < 0.1 * moved
    assert (lanes.versions[0][0] - lanes.versions[0][1]).abs().max() > 1e-3, "another rate"


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_who_is_alone_in_rounds_learns_what_it_does_without(late: float) -> None:
    """Where the outer step goes just as far as the mean; five go elsewhere."""
    config = config_of("muon")
    alone = Setting(ranks=1, local_steps=2, late=late, outer_momentum=0.0)
    rounds, synchronous = FiveRounds(config, alone), FiveRanks(config, Setting(ranks=1))
    five, weights = FiveRounds(config, replace(alone, ranks=RANKS)), []
    for step, batch in enumerate(drawn(config), 1):
        for players in (rounds, synchronous):
            players.step(batch[:1], LR)
        five.step(batch, LR)
        weights.append(torch.stack([player.weights for player in five.players]))
        equal = bool((weights[-1] == weights[-1][0]).all())
        assert equal == (step == STEPS or (step % 2 == 0 and not late))
    torch.testing.assert_close(rounds.players[0].weights, synchronous.versions[0], atol=1e-4, rtol=0)
    assert not torch.allclose(five.players[0].weights, rounds.players[0].weights, atol=1e-3)


def test_one_pass_over_the_text_and_no_more(corpus: Corpus) -> None:
    config = config_of("adamw")
    text = read_corpus(Path(corpus.path))
    windows = [Sequences(text, split, config.seq_len) for split in ("train", "validation")]
    assert 4 < train(config, Setting(), *windows).loss < 5.71  # ln 300 = 5.70
    with pytest.raises(ValueError, match="windows"):
        train(resolve("gpt2-nano", {**config.__dict__, "steps": 10**6}), Setting(), *windows)


def test_every_run_has_one_key_and_one_pc_sees_as_many_tokens() -> None:
    asked = [(opt, arm) for group in GROUPS.values() for opt, arms in group.items() for arm in arms]
    assert {arm for _, arm in asked} | RATES_ALONE.keys() == ARMS.keys() and ARMS[SYNCHRONOUS] == Setting()
    varied = itertools.product(RATES, ARMS, range(5), (0.5, 1.0))
    jobs = [Job(opt, arm, RATES[opt], seed, part) for opt, arm, seed, part in varied]
    assert len({job.key("") for job in jobs}) == len(jobs)
    assert {job.config().steps * ARMS[job.arm].sequences for job in jobs} == {6000, 12000}
    assert {job.config().warmup_steps for job in jobs if job.arm == SYNCHRONOUS} == {15, 30, 50, 100}


def test_the_times_to_a_loss_are_those_of_one_pc_s_best_batch() -> None:
    # 20 windows have the loss of 3 after half of the tokens, 40 after all of them.
    ones = [
        Alone(40, 0.01, {0.25: 5.0, 0.5: 4.0, 0.75: 3.5, 1.0: 3.0}),
        Alone(20, 0.01, {0.25: 4.0, 0.5: 3.0, 0.75: 2.5, 1.0: 2.2}),
    ]

    def times(loss: float, arm: str = "int4", optimizer: str = "muon") -> tuple[float | None, float | None]:
        row = timed(Row(optimizer, arm, [loss - 0.1, loss + 0.1], [0.0, 0.0]), ones)
        return row.tokens_times, row.times_to_loss

    assert times(3.0) == (SPEEDS["int4"], pytest.approx(SPEEDS["int4"] * 0.5))
    assert times(2.5) == (SPEEDS["int4"], pytest.approx(SPEEDS["int4"] * 0.75)), "only one batch comes so far"
    for loss in (4.5, 2.0):
        assert times(loss) == (SPEEDS["int4"], None), "before its shortest run, or never"
    assert times(3.0, arm="1 late") == times(3.0, optimizer="adamw") == (None, None), "not measured"
    assert SPEEDS.keys() <= ARMS.keys()


def test_the_ladder_s_line_is_the_one_that_its_costs_lie_on() -> None:
    arm = next(iter(ARMS_OF_LADDER))
    rungs = [
        Rung("", parameters, steps, 0.01, 3.0, {arm: [0.9 * cost, 1.1 * cost]}, [])
        for parameters in (10**5, 10**6)
        for steps in (300, 900)
        for cost in [20 * parameters**-0.25 * steps**-0.5]
    ]
    line = trend(rungs, arm)
    assert line and (line.by_size, line.by_length) == pytest.approx((-0.25, -0.5))
    assert line.at(1e8, 1e4) == pytest.approx(0.002)
    assert trend(rungs[:2], arm) is None, "a line through one size"
    free = replace(rungs[0], costs={arm: [0.01, -0.02]})
    assert trend([free, *rungs], arm) is None, "the logarithm of what costs nothing"
