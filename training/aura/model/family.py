"""Which network a configuration means."""

from __future__ import annotations

import torch

from aura.config import TrainConfig
from aura.model.gpt import GPT
from aura.model.hrm_text import HrmText
from aura.model.language_model import LanguageModel
from aura.model.qwen3 import Qwen3

NETWORKS: dict[str, type[GPT | HrmText | Qwen3]] = {"gpt2": GPT, "hrm-text": HrmText, "qwen3": Qwen3}


def model_of(config: TrainConfig, device: torch.device | str = "cpu") -> LanguageModel:
    """With its initial parameters; on the device "meta" without numbers."""
    return NETWORKS[config.family](config, device)
