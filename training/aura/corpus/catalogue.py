"""The datasets of the Hugging Face hub that have a name here, and the licences that are known.

A licence covers the collection, not the pages in it. What is written in meta.json (`licence`, `url`) is for a person
who wants to give away a model; identifiers are the hub's (https://huggingface.co/docs/hub/repositories-licenses).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from aura.errors import ConfigError

NOT_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial")
GATED = "gated"  # no licence of its own: terms on its page, which the hub lets one agree to


@dataclass(frozen=True)
class Dataset:
    path: str  # on the hub
    config: str
    licence: str
    language: str  # ISO 639-1
    only_text: bool = False  # of parquet: other columns are many times the text, and are not fetched


WIKIPEDIA, WIKIPEDIA_LICENCE = "wikimedia/wikipedia", "cc-by-sa-3.0, gfdl"
SPANISH_WIKIPEDIA = Dataset(WIKIPEDIA, "20231101.es", WIKIPEDIA_LICENCE, "es")

DATASETS = {
    "fineweb2-es": Dataset("HuggingFaceFW/fineweb-2", "spa_Latn", "odc-by", "es"),
    "fineweb2-hq-es": Dataset("epfml/FineWeb2-HQ", "spa_Latn", "odc-by", "es", only_text=True),
    "fineweb-edu": Dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", "odc-by", "en"),
    "wikipedia": SPANISH_WIKIPEDIA,  # what the guides call it
    "wikipedia-es": SPANISH_WIKIPEDIA,
    "wikipedia-en": Dataset(WIKIPEDIA, "20231101.en", WIKIPEDIA_LICENCE, "en"),
    "c4": Dataset("allenai/c4", "es", "odc-by", "es"),
}

# What `aura tune` can learn to answer from.
DIALOGUES = {
    "tulu3-es": Dataset(
        "fabriciocarraro/tulu-3-sft-personas-instruction-following-es", "default", "odc-by", "es"
    ),
    "alpaca-es": Dataset("bertin-project/alpaca-spanish", "default", "cc-by-4.0", "es"),
}

# Named often, and not for every use.
RESTRICTED = {
    "nvidia/ClimbMix": "cc-by-nc-4.0",
    "nvidia/Nemotron-ClimbMix": "cc-by-nc-4.0",
    "OptimalScale/ClimbMix": "cc-by-nc-4.0",
    "LHF/escorpius": "cc-by-nc-nd-4.0",
    "LHF/escorpius-m": "cc-by-nc-nd-4.0",
    "LHF/escorpius-mr": "cc-by-nc-nd-4.0",
    "uonlp/CulturaX": GATED,
}

# The hub finds a dataset whatever the case of its letters.
LICENCES = {
    dataset.path.lower(): dataset.licence for dataset in (*DATASETS.values(), *DIALOGUES.values())
} | {path.lower(): licence for path, licence in RESTRICTED.items()}


def page_of(path: str) -> str:
    return f"https://huggingface.co/datasets/{path}"


def check_licence(path: str, licence: str | None, accepted: Collection[str]) -> None:
    """May somebody who has accepted these licences take this dataset? Raises ConfigError."""
    named = [] if licence is None else [each.strip().lower() for each in licence.split(",")]
    for each in set(named) - {word.strip(",").lower() for word in accepted}:
        if each == GATED:
            raise ConfigError("dataset_is_gated", name=path, licence=each, url=page_of(path))
        if NOT_COMMERCIAL.search(each):
            raise ConfigError("licence_not_commercial", name=path, licence=each, url=page_of(path))
