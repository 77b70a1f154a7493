"""What both ways of playing five ranks in one process share: the setting, the wire, flat parameters, validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from aura.corpus.sequences import Order, Sequences, inputs_and_targets
from aura.model.gpt import GPT
from aura.strategy.codec import decode, encode
from torch import Tensor, nn

VALIDATED_TOGETHER = 64  # sequences


@dataclass(frozen=True)
class Setting:
    """What an arm does otherwise than the synchronous one."""

    gradients: str = "fp32"  # format of the reduce-scatter
    differences: str = "fp32"  # format of the all-gather
    late: float = 0.0  # fraction of a step (of a round) that computes before the last update has come
    predicted: bool = False  # … on w + (w - w before) in place of w
    after: float = 0.0  # no micro-batch is late before this part of the run
    local_steps: int = 0  # of every round (five_rounds.py); 0: there are none
    outer_lr: float = 1.0
    outer_momentum: float = 0.5
    ranks: int = 5
    micro_batches: int = 8  # of one sequence each, per step and rank

    @property
    def sequences(self) -> int:
        """Per step."""
        return self.ranks * self.micro_batches

    def own(self) -> dict[str, object]:
        """What differs from the synchronous fp32 arm."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Setting, name)}


def one_pass(sequences: Sequences, setting: Setting, steps: int, seeds: Sequence[int]) -> Iterator[Tensor]:
    """Of every step: whole sequences (seeds, ranks, micro-batches, seq_len + 1), in the order that each seed gives.
    Raises ValueError where there are too few."""
    if (needed := steps * setting.sequences) > len(sequences):
        raise ValueError(f"{steps} steps need {needed} windows of {len(sequences)}")
    orders = [Order(len(sequences), seed) for seed in seeds]
    shape = (setting.ranks, setting.micro_batches, -1)
    for step in range(steps):
        chosen = [order.at(step * setting.sequences, setting.sequences) for order in orders]
        yield torch.stack([sequences.batch(indices).view(shape) for indices in chosen])


@torch.no_grad()
def validated(model: GPT, sequences: Sequences, seq_len: int) -> float:
    """The loss of all of them [nats per token]."""
    whole = sequences.batch(torch.arange(len(sequences)).numpy())
    parts = [inputs_and_targets(part) for part in torch.split(whole, VALIDATED_TOGETHER)]
    total = sum(model.loss_sum(inputs, targets).item() for inputs, targets in parts)
    return total / (len(sequences) * seq_len)


def over_the_wire(values: Tensor, format_: str) -> Tensor:
    """What comes out of the codec."""
    received = decode(encode(values, format_), format_, len(values))
    if not received.isfinite().all():
        raise ValueError("something is not finite")
    return received


def flatten(model: nn.Module) -> tuple[Tensor, Tensor]:
    """All parameters, and all gradients, as one tensor each; the model's own become views of them."""
    parameters = list(model.parameters())
    values = torch.cat([parameter.data.view(-1) for parameter in parameters])
    gradients = torch.zeros_like(values)
    sizes = [parameter.numel() for parameter in parameters]
    parts = zip(parameters, torch.split(values, sizes), torch.split(gradients, sizes), strict=True)
    for parameter, value, gradient in parts:
        parameter.data = value.view_as(parameter)
        parameter.grad = gradient.view_as(parameter)
    return values, gradients
