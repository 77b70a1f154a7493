"""One process plays the five ranks of the engine: what is learnt, without the time.

Replicas are bit-equal (every rank adds the same bytes), so one model computes for all of them, and one more holds the
owners' masters. A step, as the engine does it:

- every rank computes the same number of micro-batches, the first ceil(late · number) of them on the weights before
  the update that is still on its way, or on a prediction of it: as if it were equal to the update before it;
- the reduce-scatter: the ranks' summed gradients, encoded, go to the owners, who add them up in fp32;
- the optimizer updates the owners' masters;
- the all-gather: the difference between the masters and what the replicas hold, encoded, goes to all. What the codec
loses stays
  in the masters, and so in the next difference.

Two simplifications: blocks of the codec follow the order of the parameters, not that of the owners' streams; and a
rank's own part is encoded like all others, which never leaves it in the engine.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from aura.config import TrainConfig
from aura.corpus.sequences import Sequences, inputs_and_targets
from aura.model.gpt import GPT
from aura.optim.muon import optimizer_of
from aura.optim.schedule import learning_rate
from aura.strategy.interface import clip_factor
from five_rounds import FiveRounds
from playing import Setting, flatten, one_pass, over_the_wire, validated
from torch import Tensor


@dataclass(frozen=True)
class Result:
    loss: float  # of the whole validation text [nats per token]
    seconds: float


def train(config: TrainConfig, setting: Setting, train_on: Sequences, validate_on: Sequences) -> Result:
    """One pass over the first config.steps · setting.sequences sequences of the order that config.seed gives."""
    started = time.perf_counter()
    ranks = (FiveRounds if setting.local_steps else FiveRanks)(config, setting)
    for step, (batch,) in enumerate(one_pass(train_on, setting, config.steps, [config.seed])):
        ranks.step(batch, learning_rate(config, step))
    return Result(ranks.validate(validate_on), time.perf_counter() - started)


class FiveRanks:
    def __init__(self, config: TrainConfig, setting: Setting) -> None:
        self.config, self.setting = config, setting
        self.model, self.masters = GPT(config), GPT(config)
        self.weights, self.gradient = flatten(self.model)
        self.master, self.total = flatten(self.masters)
        self.optimizer = optimizer_of(self.masters, config)
        # What replicas hold after the last update, the one before and the one before that
        self.versions = [self.master.clone() for _ in range(3)]
        # Micro-batches that do not know the last update
        self.late = math.ceil(setting.late * setting.micro_batches)
        self.first_late = round(setting.after * config.steps)  # step
        self.steps = 0

    def step(self, batch: Tensor, lr: float) -> None:
        """batch: whole sequences (ranks, micro-batches, seq_len + 1)."""
        self.total.zero_()
        if self.setting.gradients == "fp32":
            # The sum over the ranks is the same whoever computes it.
            self._compute(batch)
            self.total += self.gradient
        else:
            for sequences in batch:
                self._compute(sequences[None])
                self.total += over_the_wire(self.gradient, self.setting.gradients)
        tokens = self.setting.sequences * self.config.seq_len
        norm = torch.linalg.vector_norm(self.total).item() / tokens
        self.total *= clip_factor(norm, self.config.clip, tokens)
        self.optimizer.step(lr)
        self._send_difference()
        self.steps += 1

    def _compute(self, sequences: Tensor) -> None:
        """self.gradient: of the summed loss of the sequences (ranks, micro-batches, seq_len + 1)."""
        self.gradient.zero_()
        now, before, long_before = self.versions
        known = before + (before - long_before) if self.setting.predicted else before
        late = self.late if self.steps >= self.first_late else 0
        counts = [late, self.setting.micro_batches - late]
        for weights, part in zip((known, now), torch.split(sequences, counts, dim=1), strict=True):
            if part.numel():
                self.weights.copy_(weights)
                inputs, targets = inputs_and_targets(part.flatten(0, 1))
                self.model.loss_sum(inputs, targets).backward()  # type: ignore[no-untyped-call]

    def _send_difference(self) -> None:
        now = self.versions[0]
        difference = over_the_wire(self.master - now, self.setting.differences)
        # In fp32 the weights themselves are sent.
        after = self.master.clone() if self.setting.differences == "fp32" else now + difference
        self.versions = [after, *self.versions[:2]]

    @torch.no_grad()
    def validate(self, sequences: Sequences) -> float:
        """With the last update, which the end of a run waits for."""
        self.weights.copy_(self.versions[0])
        return validated(self.model, sequences, self.config.seq_len)
