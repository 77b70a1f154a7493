"""Which model a configuration means."""

from __future__ import annotations

import torch

from aura.config import TrainConfig
from aura.model.gpt import GPT
from aura.model.hrm_text import HrmText
from aura.model.language_model import LanguageModel


def class_of(family: str) -> type[GPT] | type[HrmText]:
    return HrmText if family == "hrm-text" else GPT


def model_of(config: TrainConfig, device: torch.device | str = "cpu") -> LanguageModel:
    """With its initial parameters; on the device "meta" without numbers."""
    return class_of(config.family)(config, device)
