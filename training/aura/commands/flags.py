"""The settings as flags of a command line."""

from __future__ import annotations

import argparse
import math
from typing import Any

from aura.config import AUTO, MANUAL, SETTINGS, flags, preset_names
from aura.errors import ConfigError
from aura.texts.console import SENTENCES, text


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--preset, and every setting of a preset, each under all of its names."""
    names = ", ".join([*preset_names(), AUTO, MANUAL])
    parser.add_argument(*flags("preset"), required=True, help=f"one of: {names}")
    group = parser.add_argument_group("settings of the preset that may be replaced")
    for name, setting in SETTINGS.items():
        choices = setting.metadata.get("choices")
        metavar = "|".join(choices) if choices else "true|false" if setting.type == "bool" else name.upper()
        # A switch may stand alone, as the guides' --gradient_checkpointing: it means true.
        switch = setting.type == "bool" or (choices and "true" in choices)
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if switch else {}
        in_english = SENTENCES["en"][f"help_{name}"]  # as the rest of --help
        group.add_argument(*flags(name), metavar=metavar, help=in_english, **alone)


def given_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """What `add_flags` has found on the command line."""
    given = {name: getattr(arguments, name) for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def number(word: str) -> float:
    value = float(word)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(text("has_to_be_more_than_0", value=word))
    return value


def add_dataset(parser: argparse._ActionsContainer) -> None:
    """What more there is to say of a dataset than its name."""
    parser.add_argument("--dataset-config", metavar="NAME", help="configuration, for example 20231101.es")
    parser.add_argument("--dataset-split", metavar="NAME", help="split (train)")
    parser.add_argument("--dataset-revision", metavar="COMMIT", help="commit (what is newest now)")


def parse_assignments(words: list[str]) -> dict[str, str]:
    """['steps=20', 'lr=1e-3'] as a dictionary."""
    for word in words:
        if "=" not in word:
            raise ConfigError("no_assignment", word=word)
    return {name: value for name, _, value in (word.partition("=") for word in words)}
