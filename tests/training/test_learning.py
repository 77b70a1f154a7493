"""The benchmark of bits and delays does what it says: five_ranks.py beside a loop that is written plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import Corpus, read_corpus
from aura.corpus.windows import Windows
from aura.model.gpt import GPT
from aura.optim.muon import optimizer_of
from five_ranks import MICRO_BATCHES, RANKS, FiveRanks, Setting, train
from learning import ARMS, CHOSEN, RATES, SYNCHRONOUS, Job, interval
from torch import Tensor

STEPS, LR = 5, 0.01


def config_of(optimizer: str) -> TrainConfig:
    small = {"layers": 1, "d_model": 32, "heads": 2, "seq_len": 8, "vocab_size": 300}
    return resolve("gpt2-nano", {**small, "steps": STEPS, "optimizer": optimizer, "clip": 0.1})


def batches(config: TrainConfig) -> list[Tensor]:
    shape = (RANKS, MICRO_BATCHES, config.seq_len + 1)
    torch.manual_seed(0)
    return [torch.randint(0, config.vocab_size, shape) for _ in range(STEPS)]


def plain(config: TrainConfig, late: int, predicted: bool) -> Tensor:
    """All weights in the end; in every step the first `late` micro-batches of all ranks do not know the last update."""
    model = GPT(config)
    optimizer = optimizer_of(model, config)
    parameters = list(model.parameters())
    history = [[p.detach().clone() for p in parameters]]
    for batch in batches(config):
        now, before = history[-1], history[-2] if len(history) > 1 else history[-1]
        long_before = history[-3] if len(history) > 2 else before if len(history) == 1 else history[0]
        old = [b + (b - c) for b, c in zip(before, long_before, strict=True)] if predicted else before
        total = [torch.zeros_like(p) for p in parameters]
        for windows, weights in ((batch[:, :late], old), (batch[:, late:], now)):
            for p, weight in zip(parameters, weights, strict=True):
                p.data.copy_(weight)
            for window in windows.flatten(0, 1):
                loss = model.loss_sum(window[None, :-1], window[None, 1:])
                for sum_, part in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                    sum_ += part / (RANKS * MICRO_BATCHES * config.seq_len)
        for p, weight, sum_ in zip(parameters, now, total, strict=True):
            p.data.copy_(weight)
            p.grad = sum_
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step(LR)
        history.append([p.detach().clone() for p in parameters])
    return torch.cat([weight.view(-1) for weight in history[-1]])


def played(config: TrainConfig, setting: Setting) -> FiveRanks:
    ranks = FiveRanks(config, setting)
    for batch in batches(config):
        ranks.step(batch, LR)
    return ranks


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("late", "predicted"), [(0, False), (2, False), (8, False), (4, True), (8, True)])
def test_late_micro_batches_compute_on_the_weights_they_know(
    optimizer: str, late: int, predicted: bool
) -> None:
    config = config_of(optimizer)
    ranks = played(config, Setting(late=late / MICRO_BATCHES, predicted=predicted))
    wanted = plain(config, late, predicted)
    assert (ranks.versions[0] - wanted).abs().max() < 1e-4
    if late:
        assert (wanted - plain(config, 0, False)).abs().max() > 1e-3, "a delay has to show"


@pytest.mark.parametrize("format_", ["bf16", "int8", "int4"])
def test_what_the_codec_loses_of_a_difference_stays_in_the_masters(format_: str) -> None:
    ranks = played(config_of("muon"), Setting(differences=format_))
    lost = (ranks.master - ranks.versions[0]).square().mean().sqrt()
    step = (ranks.versions[0] - ranks.versions[1]).square().mean().sqrt()
    assert 0 < lost < 0.3 * step


def test_with_error_feedback_no_gradient_is_lost() -> None:
    config = config_of("adamw")
    setting = Setting(gradients="int4", error_feedback=True)
    ranks, gradients, received = FiveRanks(config, setting), 0, 0
    for batch in batches(config):
        before = torch.stack(ranks.lost)
        ranks.total.zero_()
        for rank, windows in enumerate(batch):
            ranks._compute(windows[None])
            gradients = gradients + ranks.gradient
            ranks._send_gradient(rank)
        received = received + ranks.total
        assert not torch.equal(before, torch.stack(ranks.lost))
    assert torch.allclose(received + sum(ranks.lost), gradients, atol=1e-4)


def test_one_pass_over_the_text_and_no_more(corpus: Corpus) -> None:
    config = config_of("adamw")
    windows = [
        Windows(read_corpus(Path(corpus.path)), split, config.seq_len) for split in ("train", "validation")
    ]
    assert 4 < train(config, Setting(), *windows).loss < 5.71  # ln 300 = 5.70
    with pytest.raises(ValueError, match="windows"):
        train(resolve("gpt2-nano", {**config.__dict__, "steps": 10**6}), Setting(), *windows)


def test_the_interval_is_student_s() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 2.4842, abs=1e-3), pytest.approx(2 + 2.4842, abs=1e-3))


def test_the_short_form_takes_rates_that_the_long_form_has_tried() -> None:
    assert all(CHOSEN[optimizer] in rates and len(rates) >= 3 for optimizer, rates in RATES.items())
    keys = {Job(opt, arm, CHOSEN[opt], seed).key("") for opt in CHOSEN for arm in ARMS for seed in range(5)}
    assert len(keys) == 2 * len(ARMS) * 5 and ARMS[SYNCHRONOUS] == Setting()
