"""One process plays five ranks of the strategy `rounds`: each has a model and an optimizer of its own, and once in
`local_steps` steps all move along the mean of what they have moved, which goes over the wire in both directions."""

from __future__ import annotations

import math

import torch
from aura.config import TrainConfig
from aura.corpus.sequences import Sequences, inputs_and_targets
from aura.model.gpt import GPT
from aura.optim.muon import optimizer_of
from aura.strategy.interface import clip_factor
from playing import Setting, flatten, over_the_wire, validated
from torch import Tensor


class Player:
    """One of the ranks."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.model = config, GPT(config)
        self.weights, self.gradient = flatten(self.model)
        self.optimizer = optimizer_of(self.model, config)

    def step(self, sequences: Tensor, lr: float) -> None:
        """sequences: whole ones (micro-batches, seq_len + 1)."""
        self.gradient.zero_()
        inputs, targets = inputs_and_targets(sequences)
        self.model.loss_sum(inputs, targets).backward()  # type: ignore[no-untyped-call]
        norm = torch.linalg.vector_norm(self.gradient).item() / targets.numel()
        self.gradient.mul_(clip_factor(norm, self.config.clip, targets.numel()))
        self.optimizer.step(lr)


class FiveRounds:
    def __init__(self, config: TrainConfig, setting: Setting) -> None:
        self.config, self.setting = config, setting
        self.players = [Player(config) for _ in range(setting.ranks)]
        self.agreed = self.players[0].weights.clone()
        self.master, self.momentum = self.agreed.clone(), torch.zeros_like(self.agreed)
        self.late = math.ceil(setting.late * setting.local_steps)  # steps that do not know the last round
        self.left: list[Tensor] = []  # what each had when it ended
        self.steps = self.of_round = 0

    def step(self, batch: Tensor, lr: float) -> None:
        """batch: whole sequences (ranks, micro-batches, seq_len + 1)."""
        for player, sequences in zip(self.players, batch, strict=True):
            player.step(sequences, lr)
        self.steps += 1
        self.of_round += 1
        is_last = self.steps == self.config.steps
        with torch.no_grad():
            if self.left and (self.of_round == self.late or is_last):
                for player, left in zip(self.players, self.left, strict=True):
                    player.weights += self.agreed - left
                self.left = []
            if self.of_round == self.setting.local_steps or is_last:
                self._end_round()
                if self.late and not is_last:
                    return
                self.left = []
                for player in self.players:
                    player.weights.copy_(self.agreed)

    def _end_round(self) -> None:
        self.left = [player.weights.clone() for player in self.players]
        moved = [over_the_wire(self.agreed - left, self.setting.gradients) for left in self.left]
        mean = torch.stack(moved).mean(0)
        self.momentum.mul_(self.setting.outer_momentum).add_(mean)
        self.master -= self.setting.outer_lr * (mean + self.setting.outer_momentum * self.momentum)
        change = over_the_wire(self.master - self.agreed, self.setting.differences)
        self.agreed = self.master.clone() if self.setting.differences == "fp32" else self.agreed + change
        self.of_round = 0

    @torch.no_grad()
    def validate(self, sequences: Sequences) -> float:
        return validated(self.players[0].model, sequences, self.config.seq_len)
