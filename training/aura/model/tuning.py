"""A trained model as the beginning of its training on dialogues: the same, with rows for the tokens of ChatML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from aura.config import TrainConfig
from aura.families.family import rows
from aura.model.family import NETWORKS

EPOCHS = 3
# Of the rates of its first training: it shall learn to answer, and forget little.
OF_THE_RATE = 0.1
WINDOWS_OF_A_STEP = 32
LOOKS = 10  # validations and checkpoints of a run


def initial(
    parameters: Mapping[str, Tensor], tuned: TrainConfig, added: Sequence[int], end: int
) -> dict[str, Tensor]:
    """`parameters` with the rows of `tuned`. An added token begins as `end`, which ends a document: what ends an answer
    is close to it, and what begins a turn stands where documents begin."""
    grown = dict(parameters)
    for name in NETWORKS[tuned.family].vocabulary & parameters.keys():
        old = parameters[name]
        new = torch.zeros(rows(tuned), *old.shape[1:], dtype=old.dtype)
        new[: len(old)] = old
        new[list(added)] = old[end]
        grown[name] = new
    return grown


def settings_of(config: TrainConfig, vocabulary: int, windows: int, is_tuned: bool = False) -> dict[str, Any]:
    """How the model of a run with this configuration is trained on so many windows of dialogues, where nobody says it:
    a tenth of the rates (a model that is_tuned has them already), falling in a straight line, and no delay, whose cost
    was measured in first trainings only."""
    factor = 1.0 if is_tuned else OF_THE_RATE
    step = min(WINDOWS_OF_A_STEP, windows)
    steps = math.ceil(EPOCHS * windows / step)
    return {
        **asdict(config),
        "vocab_size": max(config.vocab_size, vocabulary),
        **{name: factor * getattr(config, name) for name in ("lr", "embedding_lr", "head_lr", "gain_lr")},
        "schedule": "wsd",
        **{"warmup_steps": 0, "warmup_ratio": 0.03, "decay_ratio": 1.0, "min_lr_ratio": 0.0},
        **{"epochs": EPOCHS, "tokens": 0, "steps": steps, "weight_decay": 0.0},
        **{"global_batch_tokens": step * config.seq_len, "gradient_accumulation_steps": 1},
        **{"rank_batch_sizes": "", "micro_batch": "auto", "balance": "equal"},
        "allow_dataset_oversubscription": False,
        **{"strategy": "sharded", "wire": "int4", "delay": 0.0},
        "log_every": max(1, min(config.log_every, steps // LOOKS)),
        "validate_every": max(10, steps // LOOKS),
        "save_every": max(10, min(config.save_every, steps // LOOKS)),
    }
