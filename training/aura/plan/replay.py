"""plan.json of a run: what `strategy=auto` has decided, so that a later start, or another run (--plan), does the same.

Standard library only: the command line reads it before torch is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from aura.config import TrainConfig
from aura.errors import ConfigError
from aura.plan.candidates import exchanging

PLAN = "plan.json"
SCHEMA = "aura-setting-1"


@dataclass(frozen=True)
class Replay:
    wire: str
    delay: float
    delay_after: int
    predicted_weights: bool
    # For what it was decided
    ranks: int
    sequences: int  # of a step
    loss_tolerance: float
    # What was predicted
    step_seconds: float
    one_pc_seconds: float  # for the tokens of a step
    measured: dict[str, Any]  # by which that was decided

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def is_of(self, config: TrainConfig, ranks: int) -> bool:
        """Was it decided for the same question?"""
        asked = (ranks, sum(config.shares(ranks)), config.loss_tolerance, config.predicted_weights)
        return asked == (self.ranks, self.sequences, self.loss_tolerance, self.predicted_weights)

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        """Raises ConfigError where it cannot be."""
        config = replace(config, predicted_weights=self.predicted_weights)
        return exchanging(config, self.wire, self.delay, self.delay_after)


def parse(data: bytes) -> Replay:
    """Raises ValueError with what is wrong with it."""
    values = json.loads(data)
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ValueError(f"no {SCHEMA}")
    names = {one.name: one for one in fields(Replay)}
    if missing := sorted(set(names) - set(values)):
        raise ValueError(", ".join(missing))
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "bool": bool, "int": int, "float": (int, float)}
    values = {name: values[name] for name in names if name in values}
    for name, value in values.items():
        if not isinstance(value, kinds.get(str(names[name].type), dict)):
            raise ValueError(f"{name}={value!r}")
    return Replay(**values)


def replayed(config: TrainConfig, file: Path, given: Mapping[str, Any]) -> TrainConfig:
    """The configuration with what the file says. given: the settings of the command line. Raises ConfigError."""
    others = {"strategy"} if config.strategy == "rounds" else set()
    if said := sorted(({"wire", "delay", "delay_after", "predicted_weights"} | others) & set(given)):
        raise ConfigError("plan_and_settings", file=file, names=", ".join(said))
    try:
        return parse(file.read_bytes()).applied_to(config)
    except OSError as error:
        raise ConfigError("plan_file_unusable", file=file, error=error.strerror) from None
    except (ValueError, ConfigError) as error:
        raise ConfigError("plan_file_unusable", file=file, error=error) from None
